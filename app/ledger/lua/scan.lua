-- release_expired_preallocations, recover_orphans, the abort of what nobody watches, and ring_again, each for up to
-- PER_KIND entries that are due: the cost grows with what is due, not with what exists. Idempotent. Moves ledger time,
-- and raises the version once all nodes read a newer one; exempt from not_after.
-- Touches: deadlines, nodes, unwatched, rings, avoided, tombstones, exited zsets, rec, node, avoided_times and clock
-- hashes, and what end_request, end_attempt and bury touch.
-- Arguments: min_age_ms. Answers: ran, expired, recovered, dead, bells, more.
now = advance_clock()
local last = tonumber(redis.call('HGET', P .. 'clock', 'scan'))
if last >= 0 and now - last < cmd.min_age_ms then return answer({ ran = false }) end
redis.call('HSET', P .. 'clock', 'scan', now)
local expired, recovered, dead, bells, more = {}, {}, {}, {}, false
local function due(zset, upto)
  local list = redis.call('ZRANGEBYSCORE', P .. zset, '-inf', upto, 'LIMIT', 0, PER_KIND)
  if #list == PER_KIND then more = true end
  return list
end

for _, uid in ipairs(due('deadlines', int(now))) do
  local r = load(uid)
  if r and r.state == 'QUEUED' then
    local failure = redis.call('HGET', P .. 'rec:' .. uid, 'last_failure') or ''
    end_request(r, 'EXPIRED', { error_code = 'queue_timeout', error_detail = failure })
    expired[#expired + 1] = uid
  elseif r and r.state == 'PREFILLING' and r.lease == '' then -- another attempt would only wait as long again
    end_request(r, 'EXPIRED', { error_code = 'first_token_timeout', error_detail = 'no decode node took it in time' })
    expired[#expired + 1] = uid
  elseif r and r.state == 'PREFILLING' then
    end_attempt(r, 'failure', 'first_token_timeout', '', 'EXPIRED')
    expired[#expired + 1] = uid
  else
    redis.call('ZREM', P .. 'deadlines', uid)
  end
end

local budget = PER_KIND
for _, incarnation in ipairs(due('nodes', '(' .. int(now))) do
  if redis.call('HGET', P .. 'node:' .. incarnation, 'state') ~= 'dead' then
    declare_dead(incarnation)
    dead[#dead + 1] = incarnation
  end
  local taken, left = bury(incarnation, budget, recovered)
  budget = budget - taken
  more = more or left
end

for _, uid in ipairs(due('unwatched', int(now))) do
  local r = load(uid)
  if r and in_process(r) then
    end_request(r, 'ABORTED', { error_code = 'client_gone' })
  else
    redis.call('ZREM', P .. 'unwatched', uid)
  end
end

for _, uid in ipairs(due('rings', int(now))) do
  local r = redis.call('HMGET', P .. 'rec:' .. uid, 'state', 'attempt', 'ring')
  if r[1] == 'QUEUED' then
    bells[#bells + 1] = ring({ uid = uid, attempt = tonumber(r[2]), ring = tonumber(r[3]) })
  else
    redis.call('ZREM', P .. 'rings', uid)
  end
end
for _, pair in ipairs(due('avoided', int(now - AVOID_MEMORY_MS))) do forget_pair(pair) end
for _, zset in ipairs({ 'tombstones', 'exited' }) do
  local list = due(zset, int(now))
  if #list > 0 then redis.call('ZREM', P .. zset, unpack(list)) end
end
if NEWEST > VERSION then raise_version() end
return answer({ ran = true, expired = expired, recovered = recovered, dead = dead, bells = bells, more = more })
