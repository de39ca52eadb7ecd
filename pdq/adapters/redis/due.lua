-- Which records have a lease or a deadline that has run out, or come up for a look, the longest overdue first.
--
-- KEYS  1 due (sorted set)
-- ARGV  1 limit
-- Reply request ids

return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', clock(), 'LIMIT', 0, ARGV[1])
