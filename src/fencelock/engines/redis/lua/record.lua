-- Read a record, or write it. A write fails if a higher token has written, or if the version is not the expected one.
-- KEYS: base.  ARGV: key; to write: value (empty: delete it), token, ttl, expected version (0: no record; empty: any).
-- base:record:KEY  string  "token:version:value"; without a value it is deleted, and only its token counts
-- Returns {1 if it was written, else 0; {token, version, value, ms left} or {}}.
local BASE, key, value, token, ttl, expect = KEYS[1], unpack(ARGV)
local RECORD = BASE .. ':record:' .. key
local theirs, version, text = string.match(redis.call('GET', RECORD) or '', '^(%d+):(%d+):(.*)$')
local found = text and text ~= '' and {theirs, version, text, redis.call('PTTL', RECORD)} or {}
if not token then return {0, found} end
if theirs and tonumber(token) < tonumber(theirs) then return {0, found} end
if expect ~= '' and expect ~= (found[2] or '0') then return {0, found} end
-- include mint.lua
local minted = mint()
redis.call('SET', RECORD, token .. ':' .. minted .. ':' .. value, 'PX', ttl)
return {1, value ~= '' and {token, minted, value, tonumber(ttl)} or {}}
