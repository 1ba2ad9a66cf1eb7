"""The engines: one module each, over the protocol of `fencelock.core.engine`."""
