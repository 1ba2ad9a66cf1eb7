-- One command: its name is the first argument, then come the keys, then the other arguments.
local words = {ARGV[1]}
for _, key in ipairs(KEYS) do words[#words + 1] = key end
for i = 2, #ARGV do words[#words + 1] = ARGV[i] end
return redis.call(unpack(words))
