"""The worlds in which the core runs for users: blocking and asyncio. The simulated one is in `fencelock.sim`."""
