"""The core: written once, as coroutines over the runtime port, for all engines and both runtimes."""
