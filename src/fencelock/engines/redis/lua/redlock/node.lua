-- One node of the fenced Redlock. Its keys, all under the base:
--
-- lock:NAME     string  "id:proposal:label"           the attempt that holds this node; the key expires with its ttl
-- seen          hash    name -> the highest proposal  accepted or undone here, in this period; and under names that no lock
--                       can have: \0period, \0high and \0before (the highest of this and the last period), \0floor (every
--                       deleted entry is at or below it) and \0born (the clock when this node was new, or was wiped)
-- before        hash    the same, of the period before
-- queue:NAME    zset    id by ticket                  the waiters to notify when the lock is free
-- waiters:NAME  hash    id -> "ends:channel:label"
-- A label is the owner, a newline, and the value that an election stores.
local BASE, NAME = KEYS[1], ARGV[1]
local LOCK, SEEN = BASE .. ':lock:' .. NAME, BASE .. ':seen'
