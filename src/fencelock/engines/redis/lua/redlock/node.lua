-- One node of the fenced Redlock. What it keeps, all under the base:
--
-- lock:NAME     string  "id:proposal:owner"           the attempt that has this node, for its ttl
-- seen          hash    name -> the highest proposal  accepted or undone here, in this period; and under names that no lock
--                       can have: \0period, \0high and \0before (the highest of this and the last period), \0floor (all
--                       that was forgotten lies at or below it) and \0born (the clock when this node was new, or was wiped)
-- before        hash    the same, of the period before
-- queue:NAME    zset    id by ticket                  who would like to be told when the lock comes free; a hint, no more
-- waiters:NAME  hash    id -> "ends:channel:owner"
local BASE, NAME = KEYS[1], ARGV[1]
local LOCK, SEEN = BASE .. ':lock:' .. NAME, BASE .. ':seen'
