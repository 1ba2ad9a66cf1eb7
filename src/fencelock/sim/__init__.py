"""The simulated world: the production core on a virtual clock, with every delay, loss, pause and crash from one seed.

`scheduler` is virtual time, `task` and `process` run coroutines on it, `world` is the core's port, `network` carries
messages, `engine` and `resource` answer them. `scenario` says what goes wrong, `program` what clients do, `run` plays one
seed, `history` is what came of it, `check` decides whether that was right.
"""
