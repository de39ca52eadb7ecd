-- Causes one event: judges author and time, changes the record, logs. Refused means: nothing was changed.
-- Knows no state and no event by name; what is legal comes with the call (`_executable` in ledger.py).
--
-- KEYS  see record.lua
-- ARGV  1 request id
--       2 rule (JSON): event, moves {from: to}, ends, author, rests_on {state: side}, claims, releases {retain: [side]},
--         moves_source_to_sink, voids [field], counts_attempt, look_ms, ended_ttl_ms
--       3 epoch that the author names, or ""   4 worker, or ""   5 lease TTL in ms   6 note (JSON)   7.. field, value
-- Reply see record.lua

local rule = cjson.decode(ARGV[2])
local epoch, worker = ARGV[3], ARGV[4]

if not open() then return refuse('record_not_found') end
if record.ended_ms then return refuse('record_ended') end

-- Who: the side whose running lease vouches for the author.
local vouching
if rule.author == 'source' or rule.author == 'sink' then
  vouching = holds(rule.author, epoch) and rule.author
  if not vouching then return refuse('stale_epoch') end
elseif rule.author == 'holder_of_state' then
  local side = rule.rests_on[record.state]
  if epoch ~= '' then
    vouching = side and holds(side, epoch) and side
    if not vouching then return refuse('stale_epoch') end
  elseif side and running(side) then
    return refuse('lease_held', record[side .. '_until_ms'] - now)
  end
elseif epoch ~= '' then
  vouching = (holds('source', epoch) and 'source') or (holds('sink', epoch) and 'sink')
  if not vouching then return refuse('stale_epoch') end
end

-- From where, and when.
local target = rule.moves[record.state]
if not target then return refuse('illegal_transition') end
local late = now >= tonumber(record.deadline_ms)
if rule.author == 'clock' and not late then return refuse('illegal_transition') end
if late and not rule.ends then return refuse('deadline_exceeded') end

if rule.claims then
  if running(rule.claims) then return refuse('lease_held', record[rule.claims .. '_until_ms'] - now) end
  if rule.counts_attempt and tonumber(record.attempt) >= tonumber(record.max_attempts) then
    return refuse('attempts_exhausted')
  end
end

-- Allowed. From here on only changes.
if worker == '' and vouching then worker = record[vouching .. '_worker'] end
if rule.moves_source_to_sink then
  grant('sink', record.source_worker, record.source_epoch, record.source_until_ms)
  clear('source')
end
for _, side in ipairs(rule.releases[record.retain]) do clear(side) end
for _, field in ipairs(rule.voids) do drop(field) end
if rule.counts_attempt then put('attempt', record.attempt + 1) end
if rule.claims then
  put('epoch', record.epoch + 1)
  epoch = record.epoch
  grant(rule.claims, worker, epoch, now + tonumber(ARGV[5]))
end
put('state', target)
put_all(7)
if rule.ends then put('ended_ms', now) end

save(rule.look_ms)
log(rule.event, worker, epoch ~= '' and epoch or 0, ARGV[6])
if rule.ends then
  redis.call('PEXPIRE', KEYS[1], rule.ended_ttl_ms)
  redis.call('PEXPIRE', KEYS[2], rule.ended_ttl_ms)
end
return done('ok')
