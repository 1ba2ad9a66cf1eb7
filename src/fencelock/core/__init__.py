"""The core: written once, as coroutines over the world port, for every engine and every colour."""
