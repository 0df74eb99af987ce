-- No new claims and reservations for this node; leases that it has may still become active.
-- Touches: node hash, clock hash. Arguments: incarnation. Answers: OK | UNKNOWN | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
local key = P .. 'node:' .. cmd.incarnation
local state = redis.call('HGET', key, 'state')
if not state or state == 'dead' then return answer({ status = 'UNKNOWN' }) end
redis.call('HSET', key, 'state', 'draining')
return answer({ status = 'OK' })
