"""`postgresql+advisory://`: the server's own advisory locks."""
