"""The exit codes, from sysexits.h where it defines one. `fencelock run` returns the command's own code if it ran."""

NO_LEADER = 1
USAGE = 64
UNAVAILABLE = 69
BUG = 70
OUTPUT_FAILED = 74
NOT_ACQUIRED = 75
LOST = 76
NOT_EXECUTABLE = 126
NOT_FOUND = 127
SIGNALLED = 128
"""Plus the number of the signal."""

_ERRORS = """\
  64   the arguments are wrong
  69   the engine cannot be reached, or cannot do what was asked
  70   a bug in fencelock"""
_COMMAND_ERRORS = """\
  76   lost: the lock ended while the command ran; the command was stopped
  126  the command is not executable
  127  the command was not found
  128+n  signal n came while the command was not running"""
_OWN = "  the command's own, or 128 + n if signal n ended it"

RUN_CODES = f"{_OWN}\n{_ERRORS}\n  75   not acquired: the lock was not free in time\n{_COMMAND_ERRORS}"
ELECT_CODES = f"{_OWN}, unless it stands again\n{_ERRORS}\n{_COMMAND_ERRORS}"
JOB_CODES = f"  0    also if there was nothing to run here\n{_OWN}\n{_ERRORS}\n{_COMMAND_ERRORS}"
_OUTPUT_ERRORS = f"{_ERRORS}\n  74   done, but the output cannot be written"
OUTPUT_CODES = f"  0    done\n{_OUTPUT_ERRORS}"
LEADER_CODES = f"  0    done\n  1    nobody leads\n{_OUTPUT_ERRORS}"
