-- Makes a node known. Exempt from not_after: a process has no ledger time before its first answer.
-- All that make or read tokens serve one model, all that hold KV have one layout.
-- Touches: node hashes, nodes, room, exited and owned zsets, model_nodes set, clock hash.
-- Arguments: incarnation, role, name, address, model, layout, num_blocks, room_tokens, newest, info (JSON),
-- node_ttl_ms. Answers: OK | REFUSED detail, version.
now = read_clock()
local inc = cmd.incarnation
local key = P .. 'node:' .. inc
local function refused(why) return answer({ status = 'REFUSED', detail = why, version = VERSION }) end

-- The process is gone; this call of it was under way.
if redis.call('ZSCORE', P .. 'exited', inc) then return refused('the exit of this incarnation has been reported') end
local state = redis.call('HGET', key, 'state')
if state == 'dead' and redis.call('EXISTS', P .. 'owned:' .. inc) == 1 then
  return refused('it was declared dead and what it owned is not yet taken back')
end
local function holds_kv(role) return role == 'prefill' or role == 'decode' end
local function differs(other)
  local o = redis.call('HMGET', P .. 'node:' .. other, 'model', 'layout', 'role', 'name')
  local model, layout, role = o[1] or '', o[2] or '', o[3]
  local function but(what, mine, theirs)
    return 'its ' .. what .. ' is ' .. mine .. ', but living nodes have ' .. theirs .. ' (' .. (o[4] or other) .. ')'
  end
  if model ~= '' and cmd.model ~= '' and model ~= cmd.model then return but('model', cmd.model, model) end
  if holds_kv(role) and holds_kv(cmd.role) and layout ~= cmd.layout then return but('KV layout', cmd.layout, layout) end
end
if cmd.role ~= 'control' then
  local silent, others = {}, redis.call('SMEMBERS', P .. 'model_nodes')
  table.sort(others) -- so that the same one is named each time
  for _, other in ipairs(others) do
    local why = other ~= inc and differs(other)
    if why and fresh(other) then return refused(why) end
    if why then silent[#silent + 1] = other end
  end
  -- Their next beat must not bring them back beside this node.
  for _, other in ipairs(silent) do declare_dead(other) end
end
take_from_roles(inc)
if cmd.role ~= 'control' then redis.call('SADD', P .. 'model_nodes', inc) end
if holds_kv(cmd.role) and cmd.room_tokens > 0 then
  redis.call('ZADD', P .. 'room:' .. cmd.role, cmd.room_tokens, inc)
end
redis.call('HSET', key, 'info', cmd.info, 'role', cmd.role, 'name', cmd.name, 'address', cmd.address,
  'model', cmd.model, 'layout', cmd.layout, 'num_blocks', cmd.num_blocks, 'newest', cmd.newest, 'ttl', cmd.node_ttl_ms, 'heartbeat', now,
  -- Registering again does not undo a drain.
  'state', state == 'draining' and state or 'alive')
redis.call('HSETNX', key, 'gauges', '{}')
redis.call('ZADD', P .. 'nodes', now + cmd.node_ttl_ms, inc)
return answer({ status = 'OK', version = VERSION })
