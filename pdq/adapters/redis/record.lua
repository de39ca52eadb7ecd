-- Head of every script that changes one record. The record is read whole, changed in the script's hands by put and
-- drop, and written by save, which also moves the model's counters and the record's place in `due`: both follow from
-- the record before and after, so they cannot drift from it.
--
-- KEYS  1 record (hash)  2 log (list)  3 load (hash)  4 due (sorted set)
-- ARGV  1 request id, the rest is each script's own
-- Reply {"ok", now_ms, stored, drops, sets}: the record as it was read and what was changed, for the client to put
--       together (flat lists that are there anyway cost nothing; building one for the reply costs as much as all else)
--       or {refusal code, state, remaining_ms}

local LOG_LIMIT = 200
local SIDES = {'source', 'sink'}

local now = clock()
local stored, record, sets, drops = {}, {}, {}, {}
local scored
local deltas = {}

local function put(field, value)
  if type(value) == 'number' then value = string.format('%.0f', value) end
  if record[field] ~= value then
    record[field] = value
    sets[#sets + 1] = field
    sets[#sets + 1] = value
  end
end

local function drop(field)
  if record[field] then
    record[field] = nil
    drops[#drops + 1] = field
  end
end

local function put_all(first)
  for i = first, #ARGV, 2 do put(ARGV[i], ARGV[i + 1]) end
end

local function running(side)
  local until_ms = record[side .. '_until_ms']
  return until_ms and now < tonumber(until_ms)
end

local function holds(side, epoch)
  return record[side .. '_epoch'] == epoch and running(side)
end

local function grant(side, worker, epoch, until_ms)
  put(side .. '_worker', worker)
  put(side .. '_epoch', epoch)
  put(side .. '_until_ms', until_ms)
end

local function clear(side)
  drop(side .. '_worker')
  drop(side .. '_epoch')
  drop(side .. '_until_ms')
end

local function live()
  return record.state and not record.ended_ms
end

-- The earliest instant at which the deadline or a lease runs out.
local function expiry()
  if not live() then return nil end
  local at = tonumber(record.deadline_ms)
  for _, side in ipairs(SIDES) do
    local until_ms = record[side .. '_until_ms']
    if until_ms then at = math.min(at, tonumber(until_ms)) end
  end
  return at
end

-- Adds the record to the counters of its state, or (sign -1) takes it out; `save` writes the sum.
local function count(sign)
  if not live() then return end
  local prompt, state = tonumber(record.prompt_tokens), record.state
  local amounts = {requests = 1, prompt_tokens = prompt, reserved_tokens = prompt + tonumber(record.max_new_tokens)}
  for what, amount in pairs(amounts) do
    local name = state .. ':' .. what
    deltas[name] = (deltas[name] or 0) + sign * amount
  end
end

-- Two calls, however many counters move: a call costs more than the counting.
local function save_counters()
  local moved, written = {}, {}
  for name, delta in pairs(deltas) do
    if delta ~= 0 then moved[#moved + 1] = name end
  end
  if #moved == 0 then return end
  local before = redis.call('HMGET', KEYS[3], unpack(moved))
  for i, name in ipairs(moved) do
    written[#written + 1] = name
    written[#written + 1] = tonumber(before[i] or 0) + deltas[name]
  end
  redis.call('HSET', KEYS[3], unpack(written))
end

-- Reads the record; false if there is none.
local function open()
  stored = redis.call('HGETALL', KEYS[1])
  for i = 1, #stored, 2 do record[stored[i]] = stored[i + 1] end
  count(-1)
  scored = expiry()
  return record.state ~= nil
end

local function save()
  if #drops > 0 then redis.call('HDEL', KEYS[1], unpack(drops)) end
  if #sets > 0 then redis.call('HSET', KEYS[1], unpack(sets)) end
  count(1)
  save_counters()
  local at = expiry()
  if not at then
    redis.call('ZREM', KEYS[4], ARGV[1])
  elseif at ~= scored then
    redis.call('ZADD', KEYS[4], at, ARGV[1])
  end
end

local function log(event, worker, epoch, note)
  local length = redis.call('RPUSH', KEYS[2], string.format(
    '{"at_ms":%.0f,"event":"%s","state":"%s","worker":%s,"epoch":%s,"note":%s}',
    now, event, record.state, cjson.encode(worker), epoch, note))
  if length > LOG_LIMIT then redis.call('LTRIM', KEYS[2], -LOG_LIMIT, -1) end
end

local function done(verdict)
  return {verdict, now, stored, drops, sets}
end

local function refuse(code, remaining_ms)
  return {code, record.state or '', remaining_ms or 0}
end
