-- Which records have a lease or a deadline that has run out, the longest overdue first.
--
-- KEYS  1 due (sorted set)
-- ARGV  1 limit
-- Reply request ids

return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', clock(), 'LIMIT', 0, ARGV[1])
