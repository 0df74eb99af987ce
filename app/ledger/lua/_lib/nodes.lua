-- nodes: who may take work, from which end of a line, and who is kept apart

local function fresh(incarnation)
  local till = redis.call('ZSCORE', P .. 'nodes', incarnation)
  return till and tonumber(till) >= now
end

-- Tokens that the largest living node of this role can hold; nil if there is none, or none that says so. Most often the
-- first is it: those that are silent are soon declared dead.
local function room(role)
  local zset, at = P .. 'room:' .. role, 0
  while true do
    local list = redis.call('ZREVRANGE', zset, at, at + 7, 'WITHSCORES')
    for i = 1, #list, 2 do
      if fresh(list[i]) then return tonumber(list[i + 1]) end
    end
    if #list < 16 then return nil end
    at = at + 8
  end
end

-- A node that may take new work in this role, or nil: unknown, dead, silent for longer than its TTL, or draining.
local function worker(incarnation, role)
  if not fresh(incarnation) then return nil end
  local n = redis.call('HMGET', P .. 'node:' .. incarnation, 'role', 'state', 'name', 'num_blocks', 'cursor', 'suspect')
  if n[1] ~= role or n[2] ~= 'alive' then return nil end
  return {
    key = P .. 'node:' .. incarnation, incarnation = incarnation, name = n[3], num_blocks = tonumber(n[4]),
    cursor = tonumber(n[5]) or -1, suspect = n[6],
  }
end

-- pick(list) sees the oldest WALK members, and if it takes none, WALK more from where this node's last walk that found
-- nothing had ended. So a head of requests that do not fit hides those behind it for a round, not for ever.
-- pick answers (uid, stop): stop without a uid means "nothing at all".
local function walk(zset, node, pick)
  -- Asked before `pick`, which may take members out of the line.
  local function score_of_last(list) return #list == WALK and tonumber(redis.call('ZSCORE', zset, list[WALK])) or -1 end
  local head = redis.call('ZRANGE', zset, 0, WALK - 1)
  local last = score_of_last(head)
  local uid, stop = pick(head)
  if uid or stop or last < 0 then return uid end
  local from = '(' .. int(math.max(last, node.cursor))
  local rest = redis.call('ZRANGEBYSCORE', zset, from, '+inf', 'LIMIT', 0, WALK)
  last = score_of_last(rest)
  uid, stop = pick(rest)
  if not uid and not stop then redis.call('HSET', node.key, 'cursor', last) end
  return uid
end

-- A prefill and a decode node failed each other while they had this record: the two are kept apart, and the record from
-- both of them, each time in a row for twice as long. One of them may be cut off from all others.
local function avoid(r, decode)
  local pair = r.owner .. ':' .. decode
  local times = redis.call('HINCRBY', P .. 'avoided_times', pair, 1)
  local till = now + AVOID_MS * 2 ^ math.min(times - 1, AVOID_DOUBLINGS)
  redis.call('ZADD', P .. 'avoided', till, pair)
  set(r, 'shunned', decode, 'shunned_prefill', r.owner, 'shunned_until', till)
end

local function forget_pair(pair)
  if redis.call('ZREM', P .. 'avoided', pair) == 1 then redis.call('HDEL', P .. 'avoided_times', pair) end
end

-- c: owner, shunned and shunned_until of a record.
local function apart(c, decode)
  if c.shunned == decode and now <= c.shunned_until then return true end
  local till = redis.call('ZSCORE', P .. 'avoided', c.owner .. ':' .. decode)
  return till and now <= tonumber(till)
end

-- All nodes of a role that may take new work; looked for once per call, and only where somebody is kept apart. A call is
-- about one role.
local workers
local function all_workers(role)
  if not workers then
    workers = {}
    for _, inc in ipairs(redis.call('SMEMBERS', P .. 'model_nodes')) do
      workers[#workers + 1] = worker(inc, role)
    end
  end
  return workers
end

-- Whether `c` (see apart; it needs c.need blocks) is left to others because it and this decode node are kept apart.
-- Only if there is another that could take it: a bad pair is better than none.
local function left_to_others(c, node)
  if not apart(c, node.incarnation) then return false end
  for _, other in ipairs(all_workers('decode')) do
    local inc = other.incarnation
    if inc ~= node.incarnation and c.need <= other.num_blocks and not apart(c, inc) then return true end
  end
  return false
end

-- The same at a claim: whether `c` (shunned_prefill and shunned_until of a record that needs c.need blocks) is left to
-- other prefill nodes.
local function left_to_other_prefill(c, node)
  if c.shunned_prefill ~= node.incarnation or now > c.shunned_until then return false end
  for _, other in ipairs(all_workers('prefill')) do
    if other.incarnation ~= node.incarnation and c.need <= other.num_blocks then return true end
  end
  return false
end
