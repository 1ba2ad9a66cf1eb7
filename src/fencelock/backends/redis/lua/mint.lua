-- Tokens rise even if all data is lost, as long as the clock does.
local function mint()
  local token = time[1] .. string.format('%06d', time[2])
  local last = redis.call('SET', BASE, token, 'GET')
  if last and tonumber(last) >= tonumber(token) then
    token = string.format('%.0f', last + 1)
    redis.call('SET', BASE, token)
  end
  return token
end
