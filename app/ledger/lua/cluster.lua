-- Nodes and open leases, for people: up to 1,000 of each. Changes nothing.
-- Touches: nodes, leases, queue, waiters zsets, node, lease and rec hashes, clock hash. No arguments.
now = read_clock()
local nodes, leases = {}, {}
for _, inc in ipairs(redis.call('ZRANGE', P .. 'nodes', 0, 999)) do
  local n = redis.call('HMGET', P .. 'node:' .. inc, 'info', 'gauges', 'state', 'heartbeat')
  local state = n[3]
  if state ~= 'dead' and not fresh(inc) then state = 'stale' end
  nodes[#nodes + 1] = { info = n[1], gauges = n[2], state = state, age = now - tonumber(n[4]) }
end
for _, id in ipairs(redis.call('ZRANGE', P .. 'leases', 0, 999)) do
  local l = redis.call('HMGET', P .. 'lease:' .. id, 'uid', 'attempt', 'node', 'state', 'at', 'blocks')
  leases[#leases + 1] = {
    lease_id = id, uid = l[1], client_id = redis.call('HGET', P .. 'rec:' .. l[1], 'client') or '',
    attempt = tonumber(l[2]), node = redis.call('HGET', P .. 'node:' .. l[3], 'name') or l[3], state = l[4],
    age = now - tonumber(l[5]), blocks = tonumber(l[6]),
  }
end
return answer({
  nodes = nodes, leases = leases, queued = redis.call('ZCARD', P .. 'queue'),
  waiting = redis.call('ZCARD', P .. 'waiters'), version = VERSION,
})
