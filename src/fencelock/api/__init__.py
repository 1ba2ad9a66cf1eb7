"""The public API, blocking and asyncio: delegation only. A test compares their signatures."""
