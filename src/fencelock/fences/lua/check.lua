-- fencelock's fence: an old token ends here, with an error and nothing written; otherwise the script that follows writes. The last
-- two keys are the mark and the floor, the last two arguments the token and the owner's id: they are taken away, so that the
-- script sees only its own.
do
  local id, token = table.remove(ARGV), table.remove(ARGV)
  local floor, mark = table.remove(KEYS), table.remove(KEYS)
  local seen = redis.call('GET', mark) or redis.call('GET', floor)
  if seen then
    local seen_token, seen_id = string.match(seen, '^(%d+) (.*)$')
    local mine, theirs = tonumber(token), tonumber(seen_token)
    if mine < theirs or (mine == theirs and seen_id ~= '' and seen_id ~= id) then
      return redis.error_reply('STALETOKEN ' .. token .. ' is refused, a newer holder has been here: FENCED ' .. seen)
    end
  end
  local now = token .. ' ' .. id
  if seen ~= now then redis.call('SET', mark, now) end
end
