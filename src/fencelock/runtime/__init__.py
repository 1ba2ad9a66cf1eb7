"""The runtimes for users: blocking and asyncio. The simulated one is in `fencelock.sim`."""
