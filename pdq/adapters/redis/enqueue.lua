-- Creates a record in its first state, or finds the one that is there already and changes nothing.
--
-- KEYS  see record.lua
-- ARGV  1 request id  2 timeout_ms  3 first look in ms  4.. field, value
-- Reply see record.lua; "exists" instead of "ok" if it was there

if open() then return done('exists') end
put_all(4)
put('created_ms', now)
put('deadline_ms', now + tonumber(ARGV[2]))
save(tonumber(ARGV[3]))
log('enqueue', '', 0, '{}')
return done('ok')
