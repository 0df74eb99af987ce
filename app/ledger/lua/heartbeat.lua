-- A sign of life; moves ledger time. Never makes an entry and never revives a dead one: what a node had is gone by
-- then, and it has to let go first. Exempt from not_after.
-- Touches: clock and node hashes, nodes zset. Arguments: incarnation, gauges (JSON). Answers: OK | DRAINING | UNKNOWN,
-- version.
now = advance_clock()
local key = P .. 'node:' .. cmd.incarnation
local n = redis.call('HMGET', key, 'state', 'ttl')
if not n[1] or n[1] == 'dead' then return answer({ status = 'UNKNOWN', version = VERSION }) end
redis.call('HSET', key, 'heartbeat', now, 'gauges', cmd.gauges)
redis.call('ZADD', P .. 'nodes', now + tonumber(n[2]), cmd.incarnation)
return answer({ status = n[1] == 'draining' and 'DRAINING' or 'OK', version = VERSION })
