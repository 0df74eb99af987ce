-- records: reading them, appending to them, telling those who watch

-- What every token asks for, and what only the steps of a request do.
local HOT = { 'state', 'attempt', 'fence', 'owner', 'lease', 'stamped', 'suspect' }
local COLD = {
  'client', 'failures', 'seq', 'prompt_tokens', 'max_tokens', 'queued_at', 'claimed_at', 'waited', 'max_attempts',
  'queue_timeout', 'first_token_timeout', 'record_ttl', 'failed_by', 'failed_as', 'finish_reason', 'error_code',
  'error_detail', 'ring', 'total', 'group',
}
local TEXT = {
  state = true, client = true, fence = true, owner = true, lease = true, failed_by = true, failed_as = true,
  finish_reason = true, error_code = true, error_detail = true, group = true,
}

local function read(r, fields)
  local values = redis.call('HMGET', P .. 'rec:' .. r.uid, unpack(fields))
  for i, field in ipairs(fields) do
    if TEXT[field] then r[field] = values[i] or '' else r[field] = tonumber(values[i]) or 0 end
  end
  return r
end

-- The cold fields come all at once when the first of them is asked for.
local COLD_WHEN_ASKED = {
  __index = function(r, field)
    setmetatable(r, nil)
    return read(r, COLD)[field]
  end,
}

-- All of a record except what may be large (prompt, sampling) and what few ask for; nil if there is none.
local function load(uid)
  local r = read({ uid = uid }, HOT)
  return r.state ~= '' and setmetatable(r, COLD_WHEN_ASKED) or nil
end

-- The uids of all records of its request, the first one's first.
local function group_of(r)
  if r.group == '' then return { r.uid } end
  local uids = { r.group }
  for i = 1, tonumber(redis.call('HGET', P .. 'rec:' .. r.group, 'choices') or 1) - 1 do
    uids[i + 1] = r.group .. '.' .. int(i)
  end
  return uids
end

local function set(r, ...) redis.call('HSET', P .. 'rec:' .. r.uid, ...) end
local function computing(r) return r.state == 'PREFILLING' or r.state == 'DECODING' end
local function in_process(r) return r.state == 'QUEUED' or computing(r) end
local function length(uid) return redis.call('LLEN', P .. 'tok:' .. uid) end
local function blocks(tokens) return math.ceil(tokens / cmd.block_size_tokens) end

local function output(uid, from)
  return '[' .. table.concat(redis.call('LRANGE', P .. 'tok:' .. uid, from, -1), ',') .. ']'
end

-- What a node needs to compute the attempt.
local function work(r)
  local big = redis.call('HMGET', P .. 'rec:' .. r.uid, 'prompt', 'sampling', 'salt')
  return {
    uid = r.uid, client_id = r.client, attempt = r.attempt, fence = r.fence, prompt = big[1], sampling = big[2],
    salt = big[3] or '', output = output(r.uid, 0),
  }
end

-- What web reads of it.
local function view(r, from)
  local phases = { 'queued', 'claimed', 'granted', 'first_token', 'committed', 'activated', 'finished' }
  local fields, timeline = { 'prefill_node', 'decode_node', 'logprobs', 'cached_tokens', 'choices' }, {}
  for _, phase in ipairs(phases) do fields[#fields + 1] = 't:' .. phase end
  local values = redis.call('HMGET', P .. 'rec:' .. r.uid, unpack(fields))
  for i, phase in ipairs(phases) do timeline[phase] = tonumber(values[5 + i]) end
  local logprobs = values[3] and table.concat(redis.call('LRANGE', P .. 'lp:' .. r.uid, from, -1), '|') or nil
  return {
    status = 'FOUND', uid = r.uid, client_id = r.client, state = r.state, attempt = r.attempt, failures = r.failures,
    prompt_tokens = r.prompt_tokens, output_from = from, finish_reason = r.finish_reason, error_code = r.error_code,
    error_detail = r.error_detail, prefill_node = values[1] or '', decode_node = values[2] or '',
    cached_tokens = tonumber(values[4]) or 0, choices = tonumber(values[5]) or 1, output = output(r.uid, from), logprobs = logprobs, timeline = timeline,
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

-- A suspect stands in the entry of each node that holds it (as claim or lease). A node holds one at most: it is given
-- to none that has another.
local function hold_suspect(r, incarnation)
  if r.suspect > 0 then redis.call('HSET', P .. 'node:' .. incarnation, 'suspect', r.uid) end
end

local function drop_suspect(r, incarnation)
  if r.suspect > 0 then redis.call('HDEL', P .. 'node:' .. incarnation, 'suspect') end
end

local function push(key, values)
  local have = 0
  for i = 1, #values, PUSH do
    have = redis.call('RPUSH', key, unpack(values, i, math.min(i + PUSH - 1, #values)))
  end
  return have
end

-- Appends tokens (at least one), with their logprobs if there are any, and stamps the first one ever: what its attempt
-- did not compute of the prompt belongs to it. A suspect that has got far enough is none any more.
local function append(r, tokens, their_logprobs)
  local have = push(P .. 'tok:' .. r.uid, tokens)
  if their_logprobs then push(P .. 'lp:' .. r.uid, their_logprobs) end
  if have == #tokens then set(r, 't:first_token', wall_ms(), 'cached_tokens', cmd.cached_tokens) end
  if r.suspect > 0 and have >= r.suspect then
    drop_suspect(r, r.owner)
    if r.lease ~= '' then drop_suspect(r, redis.call('HGET', P .. 'lease:' .. r.lease, 'node') or '') end
    r.suspect = 0
    set(r, 'suspect', 0)
  end
end
