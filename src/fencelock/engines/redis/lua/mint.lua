-- `clock` is this server's time in µs. Tokens rise even if all data is lost, as long as the clock does.
local time = redis.call('TIME')
local clock = time[1] .. string.sub('00000' .. time[2], -6)
local function mint()
  local token = clock
  local last = redis.call('SET', BASE, token, 'GET')
  if last and (#last > #token or (#last == #token and last >= token)) then
    token = string.format('%.0f', last + 1)
    redis.call('SET', BASE, token)
  end
  return token
end
