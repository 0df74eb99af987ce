-- PREFILLING -> DECODING and RESERVED -> ACTIVE: the decode node has the KV. Exactly one of activate, expire, abort and
-- fail wins, because each of them leaves PREFILLING.
-- Touches: rec, lease and node hashes, tok and lp lists, nodes, owned, deadlines and avoided zsets, avoided_times hash,
-- watch set, events streams, clock hash.
-- Arguments: uid, attempt, fence, lease_id, incarnation, index, token, committed_ago_ms, logprobs ("" = none),
-- cached_tokens.
-- Answers: ACTIVATED work | FENCED | DIFFERENT | GAP | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
local r = load(cmd.uid)
if not r or r.attempt ~= cmd.attempt or r.fence ~= cmd.fence or r.lease ~= cmd.lease_id then
  return answer({ status = 'FENCED' })
end
-- This call again, its first answer was lost.
if r.state == 'DECODING' and r.owner == cmd.incarnation then return answer({ status = 'ACTIVATED', work = work(r) }) end
local lease = P .. 'lease:' .. cmd.lease_id
local l = redis.call('HMGET', lease, 'state', 'node')
if r.state ~= 'PREFILLING' or l[1] ~= 'RESERVED' or l[2] ~= cmd.incarnation or not fresh(cmd.incarnation) then
  return answer({ status = 'FENCED' })
end
local have = length(cmd.uid)
if cmd.index > have then return answer({ status = 'GAP' }) end
if cmd.index < have then
  -- The ledger lost and recomputed tokens, or prefill saw others: a spliced answer would be wrong.
  if tonumber(redis.call('LINDEX', P .. 'tok:' .. cmd.uid, cmd.index)) ~= cmd.token then
    return answer({ status = 'DIFFERENT' })
  end
else
  -- The ledger lost the token that prefill had emitted (rollback).
  local logprobs = cmd.logprobs ~= '' and cmd.logprobs or nil
  append(r, { cmd.token }, logprobs and { logprobs })
  tell(redis.call('SMEMBERS', P .. 'watch:' .. cmd.uid), {
    uid = cmd.uid, index = have, tokens = int(cmd.token), logprobs = logprobs,
    cached_tokens = have == 0 and cmd.cached_tokens or nil,
  })
end
redis.call('HSET', lease, 'state', 'ACTIVE')
redis.call('ZREM', P .. 'deadlines', cmd.uid)
redis.call('ZREM', P .. 'owned:' .. r.owner, 'c:' .. cmd.uid)
drop_suspect(r, r.owner)
forget_pair(r.owner .. ':' .. cmd.incarnation)
redis.call('ZADD', P .. 'owned:' .. cmd.incarnation, now, 'c:' .. cmd.uid)
set(r, 'state', 'DECODING', 'owner', cmd.incarnation, 't:committed', wall_ms() - cmd.committed_ago_ms,
  't:activated', wall_ms())
return answer({ status = 'ACTIVATED', work = work(r) })
