-- Makes room for another leader, if this one leads.
--
-- KEYS  1 leader (string)
-- ARGV  1 who

if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
