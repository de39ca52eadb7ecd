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
local scored, freed
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

-- What the record counts for: itself, its prompt tokens, and these with all output that it may still produce.
local function amounts()
  local prompt = tonumber(record.prompt_tokens)
  return 1, prompt, prompt + tonumber(record.max_new_tokens)
end

local function add(name, sign, requests, prompt, reserved)
  local sum = deltas[name]
  if sum then
    sum[1], sum[2], sum[3] = sum[1] + sign * requests, sum[2] + sign * prompt, sum[3] + sign * reserved
  else
    deltas[name] = {sign * requests, sign * prompt, sign * reserved}
  end
end

-- Adds the record to the counters of its state and tenant, or (sign -1) takes it out; `save` writes the sum. What is
-- queued is counted by class and tenant instead. Tenants are any text, so they stand last. What one worker shall do whole
-- is counted once more until its prompt is computed: it may take no part in the prefill queue.
local function count(sign)
  if not live() then return end
  local state, tenant = record.state, record.tenant or ''
  local place = state == 'queued' and 'queued:' .. record.priority .. ':' .. tenant or state
  add(place, sign, amounts())
  add('tenant:' .. tenant, sign, amounts())
  if record.mode == 'aggregated' and (state == 'queued' or state == 'prefilling') then
    add('whole:' .. (state == 'queued' and record.priority or state), sign, amounts())
  end
end

-- A counter's three numbers; text that is none counts as nothing, and an audit finds it.
local function numbers(text)
  local requests, prompt, reserved = string.match(text or '', '^(%-?%d+) (%-?%d+) (%-?%d+)$')
  return tonumber(requests or 0), tonumber(prompt or 0), tonumber(reserved or 0)
end

local function text_of(sum)
  return string.format('%.0f %.0f %.0f', sum[1], sum[2], sum[3])
end

local function nothing(sum)
  return sum[1] == 0 and sum[2] == 0 and sum[3] == 0
end

-- Few calls, however many counters move: a call costs more than the counting. What has come to zero is left out.
local function save_counters()
  local moved, written, gone = {}, {}, {}
  for name, delta in pairs(deltas) do
    if not nothing(delta) then moved[#moved + 1] = name end
  end
  if #moved == 0 then return end
  local before = redis.call('HMGET', KEYS[3], unpack(moved))
  for i, name in ipairs(moved) do
    add(name, 1, numbers(before[i]))
    if nothing(deltas[name]) then
      gone[#gone + 1] = name
    else
      written[#written + 1] = name
      written[#written + 1] = text_of(deltas[name])
    end
  end
  if #written > 0 then redis.call('HSET', KEYS[3], unpack(written)) end
  if #gone > 0 then redis.call('HDEL', KEYS[3], unpack(gone)) end
end

-- Reads the record; false if there is none.
local function open()
  stored = redis.call('HGETALL', KEYS[1])
  for i = 1, #stored, 2 do record[stored[i]] = stored[i + 1] end
  count(-1)
  freed = live() and {amounts()}
  -- What is queued may stand there for a look.
  scored = record.state ~= 'queued' and expiry()
  return record.state ~= nil
end

-- A record that is queued comes up for a look after look_ms, if given.
local function save(look_ms)
  if #drops > 0 then redis.call('HDEL', KEYS[1], unpack(drops)) end
  if #sets > 0 then redis.call('HSET', KEYS[1], unpack(sets)) end
  count(1)
  if freed and not live() then add('ended', 1, unpack(freed)) end
  save_counters()
  local at = expiry()
  if look_ms and record.state == 'queued' then at = math.min(at, now + look_ms) end
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
