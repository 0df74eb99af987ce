-- Makes a node known. Exempt from not_after: a process has no ledger time before its first answer.
-- Touches: node hash, nodes, exited and owned zsets, kv_nodes set, clock hash.
-- Arguments: incarnation, role, name, address, layout, num_blocks, info (JSON), node_ttl_ms. Answers: OK | REFUSED detail.
now = read_clock()
local inc = cmd.incarnation
local key = P .. 'node:' .. inc
local function refused(why) return answer({ status = 'REFUSED', detail = why }) end

-- The process is gone; this call of it was under way.
if redis.call('ZSCORE', P .. 'exited', inc) then return refused('the exit of this incarnation has been reported') end
local state = redis.call('HGET', key, 'state')
if state == 'dead' and redis.call('EXISTS', P .. 'owned:' .. inc) == 1 then
  return refused('it was declared dead and what it owned is not yet taken back')
end
local holds_kv = cmd.role == 'prefill' or cmd.role == 'decode'
if holds_kv then
  for _, other in ipairs(redis.call('SMEMBERS', P .. 'kv_nodes')) do
    local o = redis.call('HMGET', P .. 'node:' .. other, 'layout', 'name')
    if other ~= inc and fresh(other) and o[1] ~= cmd.layout then
      return refused('its KV layout is ' .. cmd.layout .. ', but living nodes have ' .. o[1] .. ' (' .. o[2] .. ')')
    end
  end
  redis.call('SADD', P .. 'kv_nodes', inc)
end
redis.call('HSET', key, 'info', cmd.info, 'role', cmd.role, 'name', cmd.name, 'address', cmd.address,
  'layout', cmd.layout, 'num_blocks', cmd.num_blocks, 'ttl', cmd.node_ttl_ms, 'heartbeat', now,
  -- Registering again does not undo a drain.
  'state', state == 'draining' and state or 'alive')
redis.call('HSETNX', key, 'gauges', '{}')
redis.call('ZADD', P .. 'nodes', now + cmd.node_ttl_ms, inc)
return answer({ status = 'OK' })
