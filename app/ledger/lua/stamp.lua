-- Says whether an attempt's sequence is in the prefill node's running step.
-- Touches: rec hash, clock hash. Arguments: uid, attempt, fence, incarnation, in_step. Answers: OK | FENCED | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
local r = redis.call('HMGET', P .. 'rec:' .. cmd.uid, 'state', 'attempt', 'fence', 'owner')
-- Rule 4. After activation the attempt is the decode node's.
if r[1] ~= 'PREFILLING' or tonumber(r[2]) ~= cmd.attempt or r[3] ~= cmd.fence or r[4] ~= cmd.incarnation then
  return answer({ status = 'FENCED' })
end
redis.call('HSET', P .. 'rec:' .. cmd.uid, 'stamped', cmd.in_step and 1 or 0)
return answer({ status = 'OK' })
