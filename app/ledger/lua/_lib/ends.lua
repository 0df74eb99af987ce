-- ends: of leases, attempts, requests and watching

-- An attempt's end includes its lease's end (rule 1).
local function close_lease(r, unused)
  if r.lease == '' then return end
  local key = P .. 'lease:' .. r.lease
  local l = redis.call('HMGET', key, 'state', 'node')
  local state
  if l[1] == 'ACTIVE' then state = 'RELEASED' elseif l[1] == 'RESERVED' then state = unused else return end
  redis.call('HSET', key, 'state', state)
  redis.call('PEXPIRE', key, CLOSED_TTL_MS)
  redis.call('ZREM', P .. 'leases', r.lease)
  redis.call('ZREM', P .. 'owned:' .. l[2], 'l:' .. r.lease)
  drop_suspect(r, l[2])
end

local function let_go(r, unused_lease)
  close_lease(r, unused_lease or 'CANCELLED')
  if r.owner ~= '' then
    redis.call('ZREM', P .. 'owned:' .. r.owner, 'c:' .. r.uid)
    redis.call('PEXPIRE', P .. 'fence:' .. r.fence, CLOSED_TTL_MS)
    drop_suspect(r, r.owner)
  end
  for _, zset in ipairs({ 'queue', 'waiters', 'deadlines', 'rings' }) do redis.call('ZREM', P .. zset, r.uid) end
end

-- Of a string that names a request: it goes when the record goes, unless it names a later request by now.
local function expire_with(key, uid, ttl)
  if redis.call('GET', key) == uid then redis.call('PEXPIRE', key, ttl) end
end

-- The client id is free again, except for a while after a FINISHED request that has a deduplication window.
-- By compare: a later request may hold the guard by now.
local function free_guard(r, uid, state, window)
  local guard = P .. 'guard:' .. r.client
  if redis.call('GET', guard) ~= uid then return end
  if state == 'FINISHED' and window > 0 then redis.call('PEXPIRE', guard, window) else redis.call('DEL', guard) end
end

-- One record ends, with everything that it held. `o`: as end_request says. The event says of the record what web tells
-- with the end: cached_tokens. Fence and owner stay on the record: a repeated emit is recognised by them.
local function end_sequence(r, state, o)
  local rec = P .. 'rec:' .. r.uid
  set(r, 'state', state, 'finish_reason', o.finish_reason or '', 'error_code', o.error_code or '',
    'error_detail', o.error_detail or '', 't:finished', wall_ms())
  let_go(r, o.unused_lease)
  local watchers = redis.call('SMEMBERS', P .. 'watch:' .. r.uid)
  local cached_tokens = tonumber(redis.call('HGET', rec, 'cached_tokens'))
  tell(watchers, {
    uid = r.uid, index = o.index or length(r.uid), tokens = table.concat(o.tokens or {}, ','), state = state,
    finish_reason = o.finish_reason or '', error_code = o.error_code or '', error_detail = o.error_detail or '',
    logprobs = o.logprobs, cached_tokens = cached_tokens,
  })
  for _, watcher in ipairs(watchers) do
    local web, connection = string.match(watcher, '^([^:]*):(.*)$')
    redis.call('ZREM', P .. 'owned:' .. web, 'w:' .. r.uid .. ':' .. connection)
  end
  redis.call('DEL', P .. 'watch:' .. r.uid)
  redis.call('ZREM', P .. 'unwatched', r.uid)
  -- The largest part of it, which only computing needs.
  redis.call('HDEL', rec, 'prompt', 'sampling', 'salt')
  r.state = state
end

-- All records of a request have ended: its names are free, and everything of it goes after its TTL.
local function end_names(r, uids, state)
  local uid, ttl = uids[1], r.record_ttl
  local few = redis.call('HMGET', P .. 'rec:' .. r.uid, 'dedup_window', 'key', 'logprobs')
  free_guard(r, uid, state, tonumber(few[1]))
  for _, each in ipairs(uids) do
    redis.call('PEXPIRE', P .. 'rec:' .. each, ttl)
    redis.call('PEXPIRE', P .. 'tok:' .. each, ttl)
    if few[3] then redis.call('PEXPIRE', P .. 'lp:' .. each, ttl) end
  end
  expire_with(P .. 'latest:' .. r.client, uid, ttl)
  if few[2] ~= '' then expire_with(P .. 'idem:' .. few[2], uid, ttl) end
end

-- The only way into a terminal state. Everything that the request held ends in this step (rule 8). Of a group each
-- record finishes for itself; one that ends in any other way takes those with it that are in process. `o`:
-- finish_reason, error_code, error_detail, unused_lease (what a RESERVED lease becomes), index, tokens and logprobs of
-- the last emission.
local function end_request(r, state, o)
  end_sequence(r, state, o)
  local uids = group_of(r)
  if #uids > 1 then
    local first = P .. 'rec:' .. uids[1]
    if state == 'FINISHED' then
      if redis.call('HINCRBY', first, 'left', -1) > 0 then return end
    else
      redis.call('HSET', first, 'left', 0, 'ended_as', state)
      for _, uid in ipairs(uids) do
        local mate = load(uid)
        if mate and in_process(mate) then
          end_sequence(mate, state, { error_code = o.error_code, error_detail = o.error_detail })
        end
      end
    end
  end
  end_names(r, uids, state)
end

-- Overload is nobody's failure, but a request that is handed round and round without getting a token has an end too.
local function handed_round(r)
  local o, have = redis.call('HMGET', P .. 'rec:' .. r.uid, 'overloads', 'overload_at'), length(r.uid)
  local times = (tonumber(o[2]) == have and tonumber(o[1]) or 0) + 1
  set(r, 'overloads', times, 'overload_at', have)
  return times > MOST_OVERLOADS
end

-- The only way an attempt ends without ending its request well. Output tokens stay: the next attempt resumes after
-- them. The record goes back to its place by admission, and to its remaining queue time. Its bell is due at once.
local function end_attempt(r, kind, reason, detail, unused_lease)
  local round = kind == 'overload' and handed_round(r)
  if round then kind = 'failure' end
  if kind == 'failure' then r.failures = r.failures + 1 end
  if kind == 'final' or (kind == 'failure' and r.failures >= r.max_attempts) then
    set(r, 'failures', r.failures)
    redis.call('HSET', P .. 'rec:' .. group_of(r)[1], 'overloaded', round and 1 or 0)
    end_request(r, 'FAILED', { error_code = reason, error_detail = detail, unused_lease = unused_lease })
    return 'FAILED'
  end
  let_go(r, unused_lease)
  r.state, r.attempt, r.fence, r.owner, r.lease = 'QUEUED', r.attempt + 1, '', '', ''
  set(r, 'state', 'QUEUED', 'attempt', r.attempt, 'failures', r.failures, 'fence', '', 'owner', '', 'lease', '',
    'queued_at', now, 'ring', 0, 'total', r.prompt_tokens + length(r.uid), 'last_failure', reason .. ': ' .. detail)
  redis.call('ZADD', P .. 'queue', r.seq, r.uid)
  redis.call('ZADD', P .. 'deadlines', now + r.queue_timeout - r.waited, r.uid)
  redis.call('ZADD', P .. 'rings', now, r.uid)
  return 'REQUEUED'
end

-- The last watcher gone aborts the request, after its grace. `code`: why, if that is now. Answers as detach does.
local function unwatch(r, web, connection, code)
  redis.call('SREM', P .. 'watch:' .. r.uid, web .. ':' .. connection)
  redis.call('ZREM', P .. 'owned:' .. web, 'w:' .. r.uid .. ':' .. connection)
  if redis.call('EXISTS', P .. 'watch:' .. r.uid) == 1 then return 'WATCHED' end
  local grace = tonumber(redis.call('HGET', P .. 'rec:' .. r.uid, 'grace'))
  if grace > 0 then
    -- NX: the same detach again does not lengthen the grace.
    redis.call('ZADD', P .. 'unwatched', 'NX', now + grace, r.uid)
    return 'GRACE'
  end
  end_request(r, 'ABORTED', { error_code = code })
  return 'ABORTED'
end

local function stone(uid) redis.call('ZADD', P .. 'tombstones', now + STONE_MS, uid) end

-- How a request has ended, as abort and detach answer it.
local function end_of(r)
  local state = redis.call('HGET', P .. 'rec:' .. group_of(r)[1], 'ended_as') or r.state
  return { status = state == 'ABORTED' and 'ABORTED' or 'ENDED', state = state }
end
