-- Duplicate check, capacity check and the record (QUEUED) in one step; of a group all records, or none.
-- Touches: tombstones zset, rec hash, nodes and room zsets, guard, latest and idem strings, queue, deadlines, rings,
-- owned zsets, watch set, seq string, clock hash.
-- Arguments: uid, client_id, prompt (JSON), prompt_tokens, sampling (JSON), max_tokens, web, connection, logprobs,
-- limits, key and body ("" = no idempotency key), salt; more: of each further record uid, sampling, max_tokens, and
-- prompt and prompt_tokens unless they are those of the one before it.
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
  local k = redis.call('HMGET', P .. 'rec:' .. keyed, 'state', 'body', 'overloaded', 'ended_as')
  local state = k[4] or k[1]
  if state and state ~= 'ABORTED' and state ~= 'EXPIRED' and k[3] ~= '1' then
    return answer({ status = k[2] == cmd.body and 'KNOWN' or 'OTHER_BODY', uid = keyed })
  end
end
local holder = redis.call('GET', P .. 'guard:' .. cmd.client_id)
if holder then return answer({ status = 'DUPLICATE', uid = holder }) end
local limits = cmd.limits
local sequences = { cmd }
for _, each in ipairs(cmd.more or {}) do
  local before = sequences[#sequences]
  each.prompt = each.prompt or before.prompt
  each.prompt_tokens = each.prompt_tokens or before.prompt_tokens
  sequences[#sequences + 1] = each
end
-- What no node that runs could ever hold would wait for its timeout. Nodes that are yet to come may be larger: while a
-- role has none, nothing is too large for it. A node that names no size says nothing.
local prefill_room, decode_room = room('prefill'), room('decode')
for _, each in ipairs(sequences) do
  -- A prefill node reads the answer so far too when a request goes on elsewhere.
  if prefill_room and prefill_room < each.prompt_tokens + each.max_tokens - 1 then
    return answer({ status = 'TOO_LARGE', room_tokens = prefill_room })
  end
  if each.max_tokens > 1 and decode_room and decode_room < each.prompt_tokens + each.max_tokens then
    return answer({ status = 'TOO_LARGE', room_tokens = decode_room })
  end
end
if queued + #sequences > limits.max_queued then return answer({ status = 'FULL', queued = queued }) end

local wall = wall_ms()
for _, each in ipairs(sequences) do
  local seq, rec = redis.call('INCR', P .. 'seq'), P .. 'rec:' .. each.uid
  redis.call('HSET', rec,
    'state', 'QUEUED', 'client', cmd.client_id, 'attempt', 1, 'failures', 0, 'fence', '', 'owner', '', 'lease', '',
    'seq', seq, 'prompt', each.prompt, 'prompt_tokens', each.prompt_tokens, 'sampling', each.sampling,
    'max_tokens', each.max_tokens, 'total', each.prompt_tokens, 'queued_at', now, 'waited', 0, 'ring', 1,
    'max_attempts', limits.max_attempts, 'queue_timeout', limits.queue_timeout_ms,
    'first_token_timeout', limits.first_token_timeout_ms, 'record_ttl', limits.record_ttl_ms,
    'grace', limits.grace_ms, 'dedup_window', limits.dedup_window_ms, 'key', cmd.key, 'body', cmd.body,
    'salt', cmd.salt, 't:queued', wall)
  if cmd.logprobs then redis.call('HSET', rec, 'logprobs', 1) end
  if #sequences > 1 then redis.call('HSET', rec, 'group', cmd.uid) end
  redis.call('ZADD', P .. 'queue', seq, each.uid)
  redis.call('ZADD', P .. 'deadlines', now + limits.queue_timeout_ms, each.uid)
  redis.call('ZADD', P .. 'rings', now + RING_MS, each.uid)
  redis.call('SADD', P .. 'watch:' .. each.uid, cmd.web .. ':' .. cmd.connection)
  redis.call('ZADD', P .. 'owned:' .. cmd.web, now, 'w:' .. each.uid .. ':' .. cmd.connection)
end
if #sequences > 1 then
  redis.call('HSET', P .. 'rec:' .. cmd.uid, 'choices', #sequences, 'left', #sequences)
end
if cmd.key ~= '' then redis.call('SET', P .. 'idem:' .. cmd.key, cmd.uid) end
redis.call('SET', P .. 'guard:' .. cmd.client_id, cmd.uid)
redis.call('SET', P .. 'latest:' .. cmd.client_id, cmd.uid)
return answer({ status = 'ADMITTED', uid = cmd.uid, queued = queued + #sequences, admitted_wall_ms = wall })
