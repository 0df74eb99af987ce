-- What the ledger says a node owns and leases (rule 3). Changes nothing.
-- Touches: node, rec and lease hashes, owned, queue and waiters zsets, clock hash. Arguments: incarnation.
-- Answers: FOUND | UNKNOWN.
now = read_clock()
local state, suspect = unpack(redis.call('HMGET', P .. 'node:' .. cmd.incarnation, 'state', 'suspect'))
if not state or state == 'dead' then return answer({ status = 'UNKNOWN' }) end
local claims, leases = {}, {}
-- A second suspect does not come here: nobody need make room for it.
local function comes(uid) return not suspect or (tonumber(redis.call('HGET', P .. 'rec:' .. uid, 'suspect')) or 0) == 0 end
local head
for _, uid in ipairs(redis.call('ZRANGE', P .. 'queue', 0, suspect and WALK - 1 or 0)) do
  if comes(uid) then
    head = redis.call('ZSCORE', P .. 'queue', uid)
    break
  end
end
for _, member in ipairs(redis.call('ZRANGE', P .. 'owned:' .. cmd.incarnation, 0, -1)) do
  local kind, id = string.sub(member, 1, 1), string.sub(member, 3)
  if kind == 'c' then
    local c = redis.call('HMGET', P .. 'rec:' .. id, 'attempt', 'fence', 'state', 'seq')
    claims[#claims + 1] = {
      uid = id, attempt = tonumber(c[1]), fence = c[2], state = c[3],
      older_waits = head and tonumber(head) < tonumber(c[4]) or false,
    }
  elseif kind == 'l' then
    local l = redis.call('HMGET', P .. 'lease:' .. id, 'uid', 'attempt', 'fence', 'state')
    leases[#leases + 1] = { lease_id = id, uid = l[1], attempt = tonumber(l[2]), fence = l[3], state = l[4] }
  end
end
return answer({
  status = 'FOUND', claims = claims, leases = leases, queued = redis.call('ZCARD', P .. 'queue'),
  waiting_for_grant = redis.call('ZCARD', P .. 'waiters'),
})
