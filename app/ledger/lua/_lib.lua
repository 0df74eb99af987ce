-- Put in front of every script. KEYS[1] is the prefix "<namespace>:{0}:": the literal hash tag {0} keeps every key of a
-- partition in one slot. ARGV[1] is the command as JSON, ARGV[2] its not_after in ledger ms (empty: exempt).
-- Answers are JSON. Lists that may be empty, 64-bit numbers and prompts travel as opaque strings, because cjson turns
-- [] into {} and loses integers above 2^53.
--
-- Keys (after the prefix):
--   meta            hash    schema: version of everything below
--   clock           hash    time: ledger ms; last: TIME at the last advance; scan: ledger ms of the last scan
--   seq             string  counter of admissions
--   rec:{uid}       hash    the record; PEXPIRE only after its end
--   tok:{uid}       list    output tokens: O(1) length and append, whatever the answer's length
--   watch:{uid}     set     "web:connection" of those who want its events; never empty while in process
--   guard:{client}  string  uid that is in process under this client id; no TTL, deleted by compare on the uid
--   latest:{client} string  uid of the newest record of this client id
--   queue           zset    QUEUED uids by admission number
--   waiters         zset    PREFILLING uids that still need a decode lease, by admission number
--   deadlines       zset    uid by the ledger ms at which its state times out
--   rings           zset    QUEUED uids by the ledger ms of their next bell
--   fence:{fence}   string  uid claimed with this fence, so that a repeated claim finds it
--   lease:{id}      hash    uid, attempt, fence, node, state, blocks, at; PEXPIRE only after its end
--   leases          zset    open lease ids by ledger ms of their reservation
--   nodes           zset    incarnation by the ledger ms until which it counts as fresh; -1: declared dead
--   node:{inc}      hash    info and gauges (JSON), state, role, name, address, model, layout, num_blocks, room_tokens,
--                           ttl, heartbeat, cursor
--   model_nodes     set     incarnations of web, prefill and decode nodes that are not declared dead
--   owned:{inc}     zset    "c:uid" claims, "l:lease" leases, "w:uid:connection" watchers, by ledger ms of acquisition
--   events:{web}    stream  one field e: an event as JSON; wakes the web process up
--   tombstones      zset    uids aborted before their admission came, by the ledger ms of their expiry
--   exited          zset    incarnations whose exit was reported, by the ledger ms of their expiry

local P = KEYS[1]
local cmd = cjson.decode(ARGV[1])
local not_after = tonumber(ARGV[2])
local now = 0

local WALK = 64             -- candidates looked at per walk
local PASSED_OVER_MS = 2000 -- waiting longer than this, a request is not passed any more
local RING_MS = 1000        -- first pause between bells; doubles up to RING_MAX_MS
local RING_MAX_MS = 8000
local PER_KIND = 128        -- of each kind of work per scan, so that a scan never blocks the server for long
local CLOSED_TTL_MS = 600000 -- a closed lease or used fence is remembered this long for repeated calls
local STONE_MS = 600000     -- a tombstone outlives every not_after (5 s) by far
local EVENTS_MAXLEN = 100000
local PUSH = 1000           -- arguments per RPUSH; Lua's stack takes no more than some thousands

local function int(n) return string.format('%.0f', n) end

local wall
local function wall_ms()
  if not wall then
    local t = redis.call('TIME')
    wall = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
  end
  return wall
end

-- Ledger time starts at the server's clock, so that it does not run backwards when all data were lost.
local function start_clock()
  local t = wall_ms()
  redis.call('HSET', P .. 'clock', 'time', t, 'last', t, 'scan', -1)
  return t
end

local function read_clock()
  local t = redis.call('HGET', P .. 'clock', 'time')
  return t and tonumber(t) or start_clock()
end

-- Rule 9: a frozen or stepped clock moves ledger time by a second at most, a clock set back by nothing.
local function advance_clock()
  local c = redis.call('HMGET', P .. 'clock', 'time', 'last')
  if not c[1] then return start_clock() end
  local t = tonumber(c[1]) + math.max(0, math.min(wall_ms() - tonumber(c[2]), 1000))
  redis.call('HSET', P .. 'clock', 'time', t, 'last', wall_ms())
  return t
end

-- Rule 2: what arrives after its not_after changes nothing.
local function late() return not_after ~= nil and now > not_after end

local function answer(t)
  t.time_ms = now
  return cjson.encode(t)
end

-- records

local FIELDS = {
  'state', 'client', 'attempt', 'failures', 'fence', 'owner', 'lease', 'seq', 'prompt_tokens', 'max_tokens',
  'queued_at', 'claimed_at', 'waited', 'max_attempts', 'queue_timeout', 'first_token_timeout', 'record_ttl',
  'failed_by', 'failed_as', 'finish_reason', 'error_code', 'error_detail', 'ring', 'total',
}
local TEXT = {
  state = true, client = true, fence = true, owner = true, lease = true, failed_by = true, failed_as = true,
  finish_reason = true, error_code = true, error_detail = true,
}

-- All of a record except what may be large (prompt, sampling); nil if there is none.
local function load(uid)
  local values = redis.call('HMGET', P .. 'rec:' .. uid, unpack(FIELDS))
  if not values[1] then return nil end
  local r = { uid = uid }
  for i, field in ipairs(FIELDS) do
    if TEXT[field] then r[field] = values[i] or '' else r[field] = tonumber(values[i]) or 0 end
  end
  return r
end

local function set(r, ...) redis.call('HSET', P .. 'rec:' .. r.uid, ...) end
local function computing(r) return r.state == 'PREFILLING' or r.state == 'DECODING' end
local function in_process(r) return r.state == 'QUEUED' or computing(r) end
local function length(uid) return redis.call('LLEN', P .. 'tok:' .. uid) end
local function blocks(tokens) return math.ceil(tokens / cmd.block_size_tokens) end

local function work(r)
  local big = redis.call('HMGET', P .. 'rec:' .. r.uid, 'prompt', 'sampling')
  return {
    uid = r.uid, client_id = r.client, attempt = r.attempt, fence = r.fence, prompt = big[1], sampling = big[2],
    output = '[' .. table.concat(redis.call('LRANGE', P .. 'tok:' .. r.uid, 0, -1), ',') .. ']',
  }
end

-- Wakes up each web process among the watchers once.
local function tell(watchers, event)
  local told, payload = {}, nil
  for _, watcher in ipairs(watchers) do
    local web = string.match(watcher, '^([^:]*):')
    if not told[web] then
      told[web] = true
      payload = payload or cjson.encode(event)
      redis.call('XADD', P .. 'events:' .. web, 'MAXLEN', '~', EVENTS_MAXLEN, '*', 'e', payload)
    end
  end
end

-- Appends tokens[from..] and stamps the first one ever.
local function append(r, tokens, from)
  local key = P .. 'tok:' .. r.uid
  for i = from, #tokens, PUSH do redis.call('RPUSH', key, unpack(tokens, i, math.min(i + PUSH - 1, #tokens))) end
  redis.call('HSETNX', P .. 'rec:' .. r.uid, 't:first_token', wall_ms())
end

-- nodes

local function fresh(incarnation)
  local till = redis.call('ZSCORE', P .. 'nodes', incarnation)
  return till and tonumber(till) >= now
end

-- A node that may take new work in this role, or nil: unknown, dead, silent for longer than its TTL, or draining.
local function worker(incarnation, role)
  if not fresh(incarnation) then return nil end
  local n = redis.call('HMGET', P .. 'node:' .. incarnation, 'role', 'state', 'name', 'num_blocks', 'cursor')
  if n[1] ~= role or n[2] ~= 'alive' then return nil end
  return { key = P .. 'node:' .. incarnation, name = n[3], num_blocks = tonumber(n[4]), cursor = tonumber(n[5]) or -1 }
end

-- pick(list) sees the oldest WALK members, and if it takes none, WALK more from where this node's last walk that found
-- nothing had ended. So a head of requests that do not fit hides those behind it for a round, not for ever.
-- pick answers (uid, stop): stop without a uid means "nothing at all".
local function walk(zset, node, pick)
  local function members(list)
    local uids = {}
    for i = 1, #list, 2 do uids[#uids + 1] = list[i] end
    return uids
  end
  local head = redis.call('ZRANGE', zset, 0, WALK - 1, 'WITHSCORES')
  local uid, stop = pick(members(head))
  if uid or stop or #head < 2 * WALK then return uid end
  local from = math.max(tonumber(head[#head]), node.cursor)
  local rest = redis.call('ZRANGEBYSCORE', zset, '(' .. int(from), '+inf', 'WITHSCORES', 'LIMIT', 0, WALK)
  uid, stop = pick(members(rest))
  if not uid and not stop then redis.call('HSET', node.key, 'cursor', #rest == 2 * WALK and rest[#rest] or -1) end
  return uid
end

-- ends

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
end

local function let_go(r, unused_lease)
  close_lease(r, unused_lease or 'CANCELLED')
  if r.owner ~= '' then redis.call('ZREM', P .. 'owned:' .. r.owner, 'c:' .. r.uid) end
  for _, zset in ipairs({ 'queue', 'waiters', 'deadlines', 'rings' }) do redis.call('ZREM', P .. zset, r.uid) end
end

-- The only way into a terminal state. Everything that the request held ends in this step (rule 8). `o`: finish_reason,
-- error_code, error_detail, unused_lease (what a RESERVED lease becomes), index and tokens of the last emission.
-- Fence and owner stay on the record: a repeated emit is recognised by them.
local function end_request(r, state, o)
  local rec, ttl = P .. 'rec:' .. r.uid, r.record_ttl
  set(r, 'state', state, 'finish_reason', o.finish_reason or '', 'error_code', o.error_code or '',
    'error_detail', o.error_detail or '', 't:finished', wall_ms())
  let_go(r, o.unused_lease)
  local watchers = redis.call('SMEMBERS', P .. 'watch:' .. r.uid)
  tell(watchers, {
    uid = r.uid, index = o.index or length(r.uid), tokens = table.concat(o.tokens or {}, ','), state = state,
    finish_reason = o.finish_reason or '', error_code = o.error_code or '', error_detail = o.error_detail or '',
  })
  for _, watcher in ipairs(watchers) do
    local web, connection = string.match(watcher, '^([^:]*):(.*)$')
    redis.call('ZREM', P .. 'owned:' .. web, 'w:' .. r.uid .. ':' .. connection)
  end
  redis.call('DEL', P .. 'watch:' .. r.uid)
  -- By compare: a later request may hold the guard of this client id by now.
  if redis.call('GET', P .. 'guard:' .. r.client) == r.uid then redis.call('DEL', P .. 'guard:' .. r.client) end
  redis.call('PEXPIRE', rec, ttl)
  redis.call('PEXPIRE', P .. 'tok:' .. r.uid, ttl)
  if redis.call('GET', P .. 'latest:' .. r.client) == r.uid then redis.call('PEXPIRE', P .. 'latest:' .. r.client, ttl) end
  r.state = state
end

-- The only way an attempt ends without ending its request well. Output tokens stay: the next attempt resumes after
-- them. The record goes back to its place by admission, and to its remaining queue time. Its bell is due at once.
local function end_attempt(r, kind, reason, detail, unused_lease)
  if kind == 'failure' then r.failures = r.failures + 1 end
  if kind == 'final' or (kind == 'failure' and r.failures >= r.max_attempts) then
    set(r, 'failures', r.failures)
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

-- The last watcher gone aborts the request. Answers whether it did.
local function unwatch(r, web, connection)
  redis.call('SREM', P .. 'watch:' .. r.uid, web .. ':' .. connection)
  redis.call('ZREM', P .. 'owned:' .. web, 'w:' .. r.uid .. ':' .. connection)
  if redis.call('EXISTS', P .. 'watch:' .. r.uid) == 1 then return false end
  end_request(r, 'ABORTED', { error_code = 'client_gone' })
  return true
end

local function stone(uid) redis.call('ZADD', P .. 'tombstones', now + STONE_MS, uid) end

-- recovery

-- A bell for a QUEUED record, and the time of its next one: after 1, 2, 4, 8, 8, ... s.
local function ring(r)
  redis.call('ZADD', P .. 'rings', now + math.min(RING_MS * 2 ^ r.ring, RING_MAX_MS), r.uid)
  set(r, 'ring', math.min(r.ring + 1, 10))
  return { queue = 'prefill', uid = r.uid, attempt = r.attempt }
end

-- First of all, so that a declared-dead node gets nothing new while what it has is taken away piece by piece.
local function declare_dead(incarnation)
  redis.call('ZADD', P .. 'nodes', -1, incarnation)
  redis.call('HSET', P .. 'node:' .. incarnation, 'state', 'dead')
  redis.call('SREM', P .. 'model_nodes', incarnation)
end

local function remove_node(incarnation)
  redis.call('ZREM', P .. 'nodes', incarnation)
  redis.call('SREM', P .. 'model_nodes', incarnation)
  redis.call('DEL', P .. 'node:' .. incarnation, P .. 'owned:' .. incarnation, P .. 'events:' .. incarnation)
end

-- Takes up to `budget` holdings away from a dead node, and its entry when none is left. Answers how many it took and
-- whether some are left. `recovered` collects the uids whose attempt was failed.
local function bury(incarnation, budget, recovered)
  local owned = P .. 'owned:' .. incarnation
  local name = redis.call('HGET', P .. 'node:' .. incarnation, 'name') or incarnation
  local list = budget > 0 and redis.call('ZRANGE', owned, 0, budget - 1) or {}
  for _, member in ipairs(list) do
    local kind, rest = string.sub(member, 1, 1), string.sub(member, 3)
    if kind == 'w' then
      local uid, connection = string.match(rest, '^([^:]*):(.*)$')
      local r = load(uid)
      if r and in_process(r) then unwatch(r, incarnation, connection) end
    else
      local uid = kind == 'l' and redis.call('HGET', P .. 'lease:' .. rest, 'uid') or rest
      local r = uid and load(uid)
      local its = r and computing(r) and (kind == 'l' and r.lease == rest or kind == 'c' and r.owner == incarnation)
      if its then
        end_attempt(r, 'failure', 'node_lost', name)
        recovered[#recovered + 1] = uid
      end
    end
    redis.call('ZREM', owned, member)
  end
  local left = redis.call('EXISTS', owned) == 1
  if not left then remove_node(incarnation) end
  return #list, left
end

