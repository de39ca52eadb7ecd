-- Clears the leases that have run out and puts the record back at its next expiry, whatever `due` said of it.
--
-- KEYS  see record.lua
-- ARGV  1 request id  2 next look in ms, or ""
-- Reply see record.lua

if not open() then
  redis.call('ZREM', KEYS[4], ARGV[1])
  return refuse('record_not_found')
end
for _, side in ipairs(SIDES) do
  if not running(side) then clear(side) end
end
scored = nil
save(tonumber(ARGV[2]))
return done('ok')
