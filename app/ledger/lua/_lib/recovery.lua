-- recovery: bells, and what is taken from dead nodes

-- A bell for a QUEUED record, and the time of its next one: after 1, 2, 4, 8, 8, ... s.
local function ring(r)
  redis.call('ZADD', P .. 'rings', now + math.min(RING_MS * 2 ^ r.ring, RING_MAX_MS), r.uid)
  set(r, 'ring', math.min(r.ring + 1, 10))
  return { queue = 'prefill', uid = r.uid, attempt = r.attempt }
end

local function take_from_roles(incarnation)
  redis.call('SREM', P .. 'model_nodes', incarnation)
  redis.call('ZREM', P .. 'room:prefill', incarnation)
  redis.call('ZREM', P .. 'room:decode', incarnation)
end

-- First of all, so that a declared-dead node gets nothing new while what it has is taken away piece by piece.
local function declare_dead(incarnation)
  redis.call('ZADD', P .. 'nodes', -1, incarnation)
  redis.call('HSET', P .. 'node:' .. incarnation, 'state', 'dead')
  take_from_roles(incarnation)
end

local function remove_node(incarnation)
  redis.call('ZREM', P .. 'nodes', incarnation)
  take_from_roles(incarnation)
  redis.call('DEL', P .. 'node:' .. incarnation, P .. 'owned:' .. incarnation, P .. 'events:' .. incarnation)
  for _, pair in ipairs(redis.call('ZRANGE', P .. 'avoided', 0, -1)) do
    local prefill, decode = string.match(pair, '^([^:]*):(.*)$')
    if prefill == incarnation or decode == incarnation then forget_pair(pair) end
  end
end

-- The node of an attempt is lost. That is a failure of what the node may have been computing at that moment: it may be
-- what killed it. All else was only there, and a request is innocent of that; fewer than MOST_LOSSES times, so that its
-- end is bounded whatever happens to the nodes.
local function lose(r, as_owner, name)
  local counts = r.state == 'DECODING' or (as_owner and r.stamped == 1)
  if not counts then counts = redis.call('HINCRBY', P .. 'rec:' .. r.uid, 'losses', 1) >= MOST_LOSSES end
  local status = end_attempt(r, counts and 'failure' or 'overload', 'node_lost', name)
  -- Not from the first loss on: until each has shown on a node of its own that it is none, suspects wait for one another.
  local last_but_one = r.failures >= r.max_attempts - 1
  if counts and status == 'REQUEUED' and last_but_one then set(r, 'suspect', length(r.uid) + SUSPECT_TOKENS) end
end

-- Takes up to `budget` holdings away from a dead node, and its entry when none is left. Answers how many it took and
-- whether some are left. `recovered` collects the uids whose attempt was ended.
local function bury(incarnation, budget, recovered)
  local owned = P .. 'owned:' .. incarnation
  local name = redis.call('HGET', P .. 'node:' .. incarnation, 'name') or incarnation
  local list = budget > 0 and redis.call('ZRANGE', owned, 0, budget - 1) or {}
  for _, member in ipairs(list) do
    local kind, rest = string.sub(member, 1, 1), string.sub(member, 3)
    if kind == 'w' then
      local uid, connection = string.match(rest, '^([^:]*):(.*)$')
      local r = load(uid)
      if r and in_process(r) then unwatch(r, incarnation, connection, 'web_lost') end
    else
      local uid = kind == 'l' and redis.call('HGET', P .. 'lease:' .. rest, 'uid') or rest
      local r = uid and load(uid)
      local its = r and computing(r) and (kind == 'l' and r.lease == rest or kind == 'c' and r.owner == incarnation)
      if its then
        lose(r, kind == 'c', name)
        recovered[#recovered + 1] = uid
      end
    end
    redis.call('ZREM', owned, member)
  end
  local left = redis.call('EXISTS', owned) == 1
  if not left then remove_node(incarnation) end
  return #list, left
end

-- From now on the newest version is written that every node which is not declared dead reads.
local function raise_version()
  local newest, nodes = NEWEST, redis.call('ZRANGEBYSCORE', P .. 'nodes', 0, '+inf')
  for _, incarnation in ipairs(nodes) do
    newest = math.min(newest, tonumber(redis.call('HGET', P .. 'node:' .. incarnation, 'newest')))
  end
  if #nodes > 0 and newest > VERSION then
    VERSION = newest
    redis.call('HSET', P .. 'clock', 'version', newest)
  end
end
