-- Refuses an old token with an error before anything is written; otherwise sets the mark, and the script that follows runs. The
-- last key is the hash of the marks, whose empty field is min_token; the last three arguments are the resource, the token and the
-- claim's id. They are removed from KEYS and ARGV, so that the script that follows sees only its own.
do
  local id, token, resource = table.remove(ARGV), table.remove(ARGV), table.remove(ARGV)
  local marks = table.remove(KEYS)
  local found = redis.call('HMGET', marks, resource, '')
  local mark = found[1] or found[2]
  if mark then
    local mark_token, mark_id = string.match(mark, '^(%d+) (.*)$')
    local mine, highest = tonumber(token), tonumber(mark_token)
    if mine < highest or (mine == highest and mark_id ~= '' and mark_id ~= id) then
      return redis.error_reply('STALETOKEN ' .. token .. ' is refused, a newer holder has entered: FENCED ' .. mark)
    end
  end
  local own = token .. ' ' .. id
  if mark ~= own then redis.call('HSET', marks, resource, own) end
end
