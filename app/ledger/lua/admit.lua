-- Duplicate check, capacity check and the record (QUEUED) in one step.
-- Touches: tombstones zset, rec and node hashes, nodes zset, model_nodes set, guard and latest strings, queue, deadlines,
-- rings, owned zsets, watch set, seq string, clock hash.
-- Arguments: uid, client_id, prompt (JSON), prompt_tokens, sampling (JSON), max_tokens, web, connection, limits.
-- Answers: ADMITTED | DUPLICATE uid | FULL queued | TOO_LARGE room_tokens | TOMBSTONED | REFUSED | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
-- An abort overtook this admission (its outcome was unknown to web): it must not come to life any more.
if redis.call('ZSCORE', P .. 'tombstones', cmd.uid) then return answer({ status = 'TOMBSTONED' }) end
local queued = redis.call('ZCARD', P .. 'queue')
-- The same admission again, its first answer was lost.
if redis.call('EXISTS', P .. 'rec:' .. cmd.uid) == 1 then
  return answer({ status = 'ADMITTED', uid = cmd.uid, queued = queued })
end
-- A request watched by a dead web process would have nobody who aborts it.
if not fresh(cmd.web) then return answer({ status = 'REFUSED' }) end
local holder = redis.call('GET', P .. 'guard:' .. cmd.client_id)
if holder then return answer({ status = 'DUPLICATE', uid = holder }) end
local limits = cmd.limits
-- What no node that runs could ever hold would wait for its timeout. Nodes that are yet to come may be larger: while a
-- role has none, nothing is too large for it. A node that names no size says nothing.
local room = {}
for _, inc in ipairs(redis.call('SMEMBERS', P .. 'model_nodes')) do
  local n = redis.call('HMGET', P .. 'node:' .. inc, 'role', 'room_tokens')
  local tokens = tonumber(n[2]) or 0
  if tokens > 0 and fresh(inc) then room[n[1]] = math.max(room[n[1]] or 0, tokens) end
end
local function lacks_room(role, tokens) return room[role] and room[role] < tokens end
if lacks_room('prefill', cmd.prompt_tokens) then
  return answer({ status = 'TOO_LARGE', room_tokens = room.prefill })
end
if cmd.max_tokens > 1 and lacks_room('decode', cmd.prompt_tokens + cmd.max_tokens) then
  return answer({ status = 'TOO_LARGE', room_tokens = room.decode })
end
if queued >= limits.max_queued then return answer({ status = 'FULL', queued = queued }) end

local seq = redis.call('INCR', P .. 'seq')
redis.call('HSET', P .. 'rec:' .. cmd.uid,
  'state', 'QUEUED', 'client', cmd.client_id, 'attempt', 1, 'failures', 0, 'fence', '', 'owner', '', 'lease', '',
  'seq', seq, 'prompt', cmd.prompt, 'prompt_tokens', cmd.prompt_tokens, 'sampling', cmd.sampling,
  'max_tokens', cmd.max_tokens, 'total', cmd.prompt_tokens, 'queued_at', now, 'waited', 0, 'ring', 1,
  'max_attempts', limits.max_attempts, 'queue_timeout', limits.queue_timeout_ms,
  'first_token_timeout', limits.first_token_timeout_ms, 'record_ttl', limits.record_ttl_ms,
  't:queued', wall_ms())
redis.call('SET', P .. 'guard:' .. cmd.client_id, cmd.uid)
redis.call('SET', P .. 'latest:' .. cmd.client_id, cmd.uid)
redis.call('ZADD', P .. 'queue', seq, cmd.uid)
redis.call('ZADD', P .. 'deadlines', now + limits.queue_timeout_ms, cmd.uid)
redis.call('ZADD', P .. 'rings', now + RING_MS, cmd.uid)
redis.call('SADD', P .. 'watch:' .. cmd.uid, cmd.web .. ':' .. cmd.connection)
redis.call('ZADD', P .. 'owned:' .. cmd.web, now, 'w:' .. cmd.uid .. ':' .. cmd.connection)
return answer({ status = 'ADMITTED', uid = cmd.uid, queued = queued + 1 })
