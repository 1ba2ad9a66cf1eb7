-- fencelock's fence: an old token ends here, with an error and nothing written; otherwise the script that follows writes. The last
-- key is the hash with the marks, whose empty field is the floor; the last three arguments are the resource, the token and the
-- owner's id: they are taken away, so that the script sees only its own.
do
  local id, token, resource = table.remove(ARGV), table.remove(ARGV), table.remove(ARGV)
  local marks = table.remove(KEYS)
  local found = redis.call('HMGET', marks, resource, '')
  local seen = found[1] or found[2]
  if seen then
    local seen_token, seen_id = string.match(seen, '^(%d+) (.*)$')
    local mine, theirs = tonumber(token), tonumber(seen_token)
    if mine < theirs or (mine == theirs and seen_id ~= '' and seen_id ~= id) then
      return redis.error_reply('STALETOKEN ' .. token .. ' is refused, a newer holder has been here: FENCED ' .. seen)
    end
  end
  local now = token .. ' ' .. id
  if seen ~= now then redis.call('HSET', marks, resource, now) end
end
