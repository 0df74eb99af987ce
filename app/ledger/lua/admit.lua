-- Duplicate check, capacity check and the record (QUEUED) in one step.
-- Touches: tombstones zset, rec hash, nodes and room zsets, guard, latest and idem strings, queue, deadlines, rings,
-- owned zsets, watch set, seq string, clock hash.
-- Arguments: uid, client_id, prompt (JSON), prompt_tokens, sampling (JSON), max_tokens, web, connection, logprobs,
-- limits, key and body ("" = no idempotency key), salt.
-- Answers: ADMITTED admitted_wall_ms | KNOWN uid | OTHER_BODY uid | DUPLICATE uid | FULL queued |
-- TOO_LARGE room_tokens | TOMBSTONED | REFUSED | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
-- An abort overtook this admission (its outcome was unknown to web): it must not come to life any more.
if redis.call('ZSCORE', P .. 'tombstones', cmd.uid) then return answer({ status = 'TOMBSTONED' }) end
local queued = redis.call('ZCARD', P .. 'queue')
-- The same admission again, its first answer was lost.
local admitted = redis.call('HGET', P .. 'rec:' .. cmd.uid, 't:queued')
if admitted then
  return answer({ status = 'ADMITTED', uid = cmd.uid, queued = queued, admitted_wall_ms = tonumber(admitted) })
end
-- A request watched by a dead web process would have nobody who aborts it.
if not fresh(cmd.web) then return answer({ status = 'REFUSED' }) end
-- The key stays with a request that was computed, well or not; what was aborted, expired or had no room was not.
local keyed = cmd.key ~= '' and redis.call('GET', P .. 'idem:' .. cmd.key)
if keyed then
  local k = redis.call('HMGET', P .. 'rec:' .. keyed, 'state', 'body', 'overloaded')
  if k[1] and k[1] ~= 'ABORTED' and k[1] ~= 'EXPIRED' and k[3] ~= '1' then
    return answer({ status = k[2] == cmd.body and 'KNOWN' or 'OTHER_BODY', uid = keyed })
  end
end
local holder = redis.call('GET', P .. 'guard:' .. cmd.client_id)
if holder then return answer({ status = 'DUPLICATE', uid = holder }) end
local limits = cmd.limits
-- What no node that runs could ever hold would wait for its timeout. Nodes that are yet to come may be larger: while a
-- role has none, nothing is too large for it. A node that names no size says nothing.
local prefill_room = room('prefill')
-- A prefill node reads the answer so far too when a request goes on elsewhere.
if prefill_room and prefill_room < cmd.prompt_tokens + cmd.max_tokens - 1 then
  return answer({ status = 'TOO_LARGE', room_tokens = prefill_room })
end
local decode_room = cmd.max_tokens > 1 and room('decode')
if decode_room and decode_room < cmd.prompt_tokens + cmd.max_tokens then
  return answer({ status = 'TOO_LARGE', room_tokens = decode_room })
end
if queued >= limits.max_queued then return answer({ status = 'FULL', queued = queued }) end

local seq, wall = redis.call('INCR', P .. 'seq'), wall_ms()
redis.call('HSET', P .. 'rec:' .. cmd.uid,
  'state', 'QUEUED', 'client', cmd.client_id, 'attempt', 1, 'failures', 0, 'fence', '', 'owner', '', 'lease', '',
  'seq', seq, 'prompt', cmd.prompt, 'prompt_tokens', cmd.prompt_tokens, 'sampling', cmd.sampling,
  'max_tokens', cmd.max_tokens, 'total', cmd.prompt_tokens, 'queued_at', now, 'waited', 0, 'ring', 1,
  'max_attempts', limits.max_attempts, 'queue_timeout', limits.queue_timeout_ms,
  'first_token_timeout', limits.first_token_timeout_ms, 'record_ttl', limits.record_ttl_ms,
  'grace', limits.grace_ms, 'dedup_window', limits.dedup_window_ms, 'key', cmd.key, 'body', cmd.body,
  'salt', cmd.salt, 't:queued', wall)
if cmd.logprobs then redis.call('HSET', P .. 'rec:' .. cmd.uid, 'logprobs', 1) end
if cmd.key ~= '' then redis.call('SET', P .. 'idem:' .. cmd.key, cmd.uid) end
redis.call('SET', P .. 'guard:' .. cmd.client_id, cmd.uid)
redis.call('SET', P .. 'latest:' .. cmd.client_id, cmd.uid)
redis.call('ZADD', P .. 'queue', seq, cmd.uid)
redis.call('ZADD', P .. 'deadlines', now + limits.queue_timeout_ms, cmd.uid)
redis.call('ZADD', P .. 'rings', now + RING_MS, cmd.uid)
redis.call('SADD', P .. 'watch:' .. cmd.uid, cmd.web .. ':' .. cmd.connection)
redis.call('ZADD', P .. 'owned:' .. cmd.web, now, 'w:' .. cmd.uid .. ':' .. cmd.connection)
return answer({ status = 'ADMITTED', uid = cmd.uid, queued = queued + 1, admitted_wall_ms = wall })
