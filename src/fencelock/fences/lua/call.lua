-- Runs one command: ARGV[1] is its name, then come its keys, then its other arguments. Lua's unpack is limited to some thousands
-- of values, so the keys of a DEL and the fields of an HSET go in batches, and the reply is the sum.
local name, batch = ARGV[1], 2000
local function call(head, tail, first, last)
  local words = {name}
  for _, word in ipairs(head) do words[#words + 1] = word end
  for i = first, last do words[#words + 1] = tail[i] end
  return redis.call(unpack(words))
end
local head, tail, first = KEYS, ARGV, 2
if name == 'DEL' then head, tail, first = {}, KEYS, 1 end
if #tail - first < batch then return call(head, tail, first, #tail) end
local sum = 0
for from = first, #tail, batch do sum = sum + call(head, tail, from, math.min(from + batch - 1, #tail)) end
return sum
