-- One command: its name is the first argument, then come the keys, then the other arguments. Lua can hand on some thousands of
-- words at once: more keys of a DEL, or fields of a HSET, go in portions, and the answer is the sum.
local name, most = ARGV[1], 2000
local function call(head, tail, first, last)
  local words = {name}
  for _, word in ipairs(head) do words[#words + 1] = word end
  for i = first, last do words[#words + 1] = tail[i] end
  return redis.call(unpack(words))
end
local head, tail, first = KEYS, ARGV, 2
if name == 'DEL' then head, tail, first = {}, KEYS, 1 end
if #tail - first < most then return call(head, tail, first, #tail) end
local sum = 0
for from = first, #tail, most do sum = sum + call(head, tail, from, math.min(from + most - 1, #tail)) end
return sum
