-- Makes one the leader, or lets the one that is it already stay so for longer.
--
-- KEYS  1 leader (string)
-- ARGV  1 who  2 TTL in ms
-- Reply 1: leads, 0: another one does

local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
