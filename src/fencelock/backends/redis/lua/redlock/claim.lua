-- Take this node for an attempt, if it is free and the proposal is above all that it has seen.
-- KEYS: lock, seen, before, queue, waiters.  ARGV: name, id, proposal, ttl, owner.
-- Returns {1}: acknowledged; {0, ms}: somebody else has it, for so long; {-1, last}: the proposal is too low.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- include redlock/last.lua
local name, id, proposal, ttl, owner = unpack(ARGV)
local state = turn(name)
local holder, held = string.match(redis.call('GET', LOCK) or '', '^([^:]*):(%d+):')
if holder == id and held == proposal then
  redis.call('PEXPIRE', LOCK, ttl + 1) -- asked again, as an answer was lost
  return {1}
end
-- An earlier attempt of the same claim was given up by whoever asks now.
if holder and (holder ~= id or tonumber(held) > tonumber(proposal)) then return {0, redis.call('PTTL', LOCK)} end
local known = math.max(last(name, state), tonumber(state[6]))
if tonumber(proposal) <= known then return {-1, known} end
raise(name, proposal, state)
take(id, proposal, ttl, owner)
leave_line(id)
return {1}
