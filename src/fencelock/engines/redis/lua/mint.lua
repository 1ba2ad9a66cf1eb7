-- Mint a token: the server's clock in µs, or the last token + 1. So tokens rise even after a loss of all data, as long as the
-- clock does not go back.
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
