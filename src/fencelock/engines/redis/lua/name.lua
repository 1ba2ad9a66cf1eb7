-- The keys of a name, and its exclusive holder.
--
-- base            string  the last token of the bucket; the only key that outlives a name's holders and waiters
-- base:lock:N     string  "id:token:ttl:label"               the exclusive holder of N; the key expires with its ttl
-- base:holders:N  hash    id -> "ends:token:ttl:mode:label"  the shared holders
-- base:queue:N    list    ids of the waiters, in order
-- base:waiters:N  hash    id -> "ends:ttl:mode:channel:attempt_no:label"  the waiters; a notification repeats the attempt_no,
--                         so that the client ignores one for an earlier queue entry, which has expired since
-- base:abandoned:ID  string  this claim was abandoned: an attempt of it that arrives later is refused
-- A label is the owner, a newline, and the value that an election stores. Times are ms on this server's clock. A ttl is 1 ms
-- longer than the client's. mode: x (exclusive), s (shared), or a number (one of so many permits). All keys of a name share the
-- hash tag in `base`.
local LOCK, HOLDERS = BASE .. ':lock:' .. NAME, BASE .. ':holders:' .. NAME
local QUEUE, WAITERS = BASE .. ':queue:' .. NAME, BASE .. ':waiters:' .. NAME

local exclusive = redis.call('GET', LOCK)

local function holds_exclusively(id) return exclusive and string.sub(exclusive, 1, #id) == id end
