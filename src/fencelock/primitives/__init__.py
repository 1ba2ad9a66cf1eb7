"""The primitives: they acquire leases and give them to users."""
