-- Ends an attempt and its lease.
-- Touches: rec and lease hashes, avoided zset, avoided_times hash, clock hash, and what end_attempt touches.
-- Arguments: uid, attempt, fence, incarnation, lease_id, kind, reason, detail, avoid_pair.
-- Answers: REQUEUED attempt | FAILED attempt | FENCED | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
local r = load(cmd.uid)
if not r then return answer({ status = 'FENCED' }) end
local by = cmd.fence .. ':' .. cmd.incarnation
-- This call again, its first answer was lost.
if r.failed_by == by and (r.attempt == cmd.attempt + 1 or (r.state == 'FAILED' and r.attempt == cmd.attempt)) then
  return answer({ status = r.failed_as, attempt = r.attempt })
end

-- Rule 4. Prefill may while the attempt is its own: after activation it is a zombie with a true fence.
local function entitled()
  if not computing(r) or r.attempt ~= cmd.attempt or r.fence ~= cmd.fence then return false end
  if cmd.lease_id == '' then return r.owner == cmd.incarnation end
  if r.lease ~= cmd.lease_id then return false end
  local l = redis.call('HMGET', P .. 'lease:' .. cmd.lease_id, 'node', 'state')
  return l[1] == cmd.incarnation and (l[2] == 'RESERVED' or l[2] == 'ACTIVE')
end
if not entitled() then return answer({ status = 'FENCED' }) end
if cmd.avoid_pair and r.state == 'PREFILLING' and r.lease ~= '' then
  avoid(r, redis.call('HGET', P .. 'lease:' .. r.lease, 'node'))
end
local as = end_attempt(r, cmd.kind, cmd.reason, cmd.detail)
set(r, 'failed_by', by, 'failed_as', as)
return answer({ status = as, attempt = r.attempt })
