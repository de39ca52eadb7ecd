-- Which of these records are live and not on the due list: no reaper would ever visit them.
--
-- KEYS  1 due (sorted set)  2.. record (hash)
-- ARGV  their request ids
-- Reply places (from 0) in ARGV

local found = {}
for i, id in ipairs(ARGV) do
  local f = redis.call('HMGET', KEYS[i + 1], 'state', 'ended_ms')
  if f[1] and not f[2] and not redis.call('ZSCORE', KEYS[1], id) then found[#found + 1] = i - 1 end
end
return found
