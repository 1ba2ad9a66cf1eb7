"""The two colours of the public API: delegation only. A test compares their signatures."""
