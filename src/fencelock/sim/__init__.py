"""The simulator: the production code on a virtual clock; one seed decides every delay, loss, pause and crash.

`scheduler` keeps virtual time, `task` and `process` run coroutines on it, `runtime` is the core's port, `network` and
`connection` carry messages, the engines and `resource` answer them. `scenario` lists the faults, `program` is what clients
do, `run` plays one seed, `history` is its record, and `check` finds what is wrong in it.
"""
