-- Writes fields under a running lease, without an event; then lets the lease go, if asked.
--
-- KEYS  see record.lua
-- ARGV  1 request id  2 side  3 epoch  4 "release" or "keep"  5.. field, value
-- Reply {"ok"}, or a refusal as in record.lua

if not open() then return refuse('record_not_found') end
if record.ended_ms then return refuse('record_ended') end
if not holds(ARGV[2], ARGV[3]) then return refuse('stale_epoch') end
put_all(5)
if ARGV[4] == 'release' then clear(ARGV[2]) end
save()
return {'ok'}
