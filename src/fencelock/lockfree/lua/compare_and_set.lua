-- Sets KEYS[1] to ARGV[3], if its value is still ARGV[2] (ARGV[1] = '1') or it is still absent ('0'); returns 1 or 0.
-- ARGV[4]: milliseconds to live; '' keeps the present time to live.
local value = redis.call('GET', KEYS[1])
if ARGV[1] == '0' then
  if value then return 0 end
elseif value ~= ARGV[2] then
  return 0
end
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
elseif value then
  redis.call('SET', KEYS[1], ARGV[3], 'KEEPTTL')
else
  redis.call('SET', KEYS[1], ARGV[3])
end
return 1
