-- Prolongs many leases of one model. A lease that has run out is lost and stays lost.
--
-- KEYS  1 due (sorted set)  2.. record (hash), one per hold
-- ARGV  1 lease TTL in ms, then per hold: request id, side, epoch
-- Reply the places (from 0) of the holds that are lost

local now = clock()
local until_ms = now + tonumber(ARGV[1])
local lost, scores = {}, {}

for i = 2, #KEYS do
  local id, side, epoch = ARGV[3 * i - 4], ARGV[3 * i - 3], ARGV[3 * i - 2]
  local other = side == 'source' and 'sink' or 'source'
  local held = redis.call('HMGET', KEYS[i], side .. '_epoch', side .. '_until_ms', other .. '_until_ms', 'deadline_ms')
  if held[1] == epoch and now < tonumber(held[2]) then
    redis.call('HSET', KEYS[i], side .. '_until_ms', string.format('%.0f', until_ms))
    scores[#scores + 1] = math.min(until_ms, tonumber(held[3] or until_ms), tonumber(held[4]))
    scores[#scores + 1] = id
  else
    lost[#lost + 1] = i - 2
  end
end
if #scores > 0 then redis.call('ZADD', KEYS[1], unpack(scores)) end
return lost
