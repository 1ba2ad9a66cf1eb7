-- Tokens rise even if all data is lost, as long as the clock does.
local function mint()
  local token = clock
  local last = redis.call('SET', BASE, token, 'GET')
  if last and (#last > #token or (#last == #token and last >= token)) then
    token = string.format('%.0f', last + 1)
    redis.call('SET', BASE, token)
  end
  return token
end
