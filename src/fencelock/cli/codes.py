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

TABLE = """\
exit codes:
  the command's own, or 128 + n if signal n ended it
  64   the arguments are wrong
  69   the engine cannot be reached, or cannot do what was asked
  70   a bug in fencelock
  75   not acquired: the lock was not free in time
  76   lost: the lock ended while the command ran; the command was stopped
  126  the command is not executable
  127  the command was not found
  128+n  signal n came before the command was started"""

ELECT_TABLE = """\
exit codes:
  that of a command that ended with an error or after a signal, or 128 + n
  64   the arguments are wrong
  69   the engine cannot do what was asked
  70   a bug in fencelock
  76   lost: the term ended after a signal, before the command had ended
  126  the command is not executable
  127  the command was not found
  128+n  signal n came while the command was not running"""

SHORT_TABLE = """\
exit codes:
  0    done
  64   the arguments are wrong
  69   the engine cannot be reached, or cannot do what was asked
  70   a bug in fencelock
  74   done, but the output cannot be written"""
