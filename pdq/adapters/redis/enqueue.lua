-- Creates a record in its first state, or finds the one that is there already and changes nothing.
--
-- KEYS  see record.lua, and if the job's producer does not know the request id: 5 job (string)
-- ARGV  1 request id  2 timeout_ms  3 first look in ms  4 how long an ended record stays, in ms  5.. field, value
-- Reply see record.lua; "exists" instead of "ok" if it was there

if open() then return done('exists') end
put_all(5)
put('created_ms', now)
put('deadline_ms', now + tonumber(ARGV[2]))
save(tonumber(ARGV[3]))
if KEYS[5] then redis.call('SET', KEYS[5], ARGV[1], 'PX', ARGV[2] + ARGV[4]) end
log('enqueue', '', 0, '{}')
return done('ok')
