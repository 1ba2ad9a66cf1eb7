"""Tools that need no lock, awaited: the same names as in `fencelock.lockfree`, and the ASGI middleware in `.asgi`."""
