-- Mint a token, and store a claim as a holder.
-- include mint.lua
local now = tonumber(string.sub(clock, 1, -4))

local function hold(id, token, ttl, mode, label)
  if mode == 'x' then
    exclusive = id .. ':' .. token .. ':' .. ttl .. ':' .. label
    redis.call('SET', LOCK, exclusive, 'PX', ttl)
  else
    redis.call('HSET', HOLDERS, id, now + ttl .. ':' .. token .. ':' .. ttl .. ':' .. mode .. ':' .. label)
    if redis.call('PTTL', HOLDERS) < tonumber(ttl) then redis.call('PEXPIRE', HOLDERS, ttl) end
  end
end
