-- Compares what is kept beside the records of a model (counters, due list) with the records themselves, in one step. What
-- a record counts for and when it is due is record.lua's word, here as everywhere.
--
-- KEYS  1 due (sorted set)  2 load (hash)
-- ARGV  1 the keys of records up to the request id (they share the slot of KEYS)  2 limit  3 "1": mend the counters
-- Reply {} if more is on the due list than the limit, else {counters, recount (both: name, value, ...), ids on the due
--       list without a live record, ids that stand there later than something of theirs runs out}

if redis.call('ZCARD', KEYS[1]) > tonumber(ARGV[2]) then return {} end

-- What has ended does not follow from the records that are there now.
local function recountable(name)
  return name ~= 'ended'
end

local strays, late = {}, {}
local listed = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 1, #listed, 2 do
  local id, flat = listed[i], redis.call('HGETALL', ARGV[1] .. listed[i])
  record = {}
  for j = 1, #flat, 2 do record[flat[j]] = flat[j + 1] end
  if live() then
    count(1)
    if tonumber(listed[i + 1]) > expiry() then late[#late + 1] = id end
  else
    strays[#strays + 1] = id
  end
end

local counters, recount = {}, {}
for name, sum in pairs(deltas) do
  recount[#recount + 1] = name
  recount[#recount + 1] = text_of(sum)
end
local kept = redis.call('HGETALL', KEYS[2])
for i = 1, #kept, 2 do
  if recountable(kept[i]) then
    counters[#counters + 1] = kept[i]
    counters[#counters + 1] = kept[i + 1]
    if ARGV[3] == '1' then redis.call('HDEL', KEYS[2], kept[i]) end
  end
end
if ARGV[3] == '1' then
  for i = 1, #recount, 2 do redis.call('HSET', KEYS[2], recount[i], recount[i + 1]) end
end
return {counters, recount, strays, late}
