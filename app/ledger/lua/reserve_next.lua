-- A lease for the next waiter that fits a decode node; one lease per attempt. It starts with the blocks of prompt +
-- output so far and one more; the node adds others by itself, and says so with `emit`.
-- Touches: tok list, lease hash, leases, waiters, nodes, owned, avoided zsets, model_nodes set, rec and node hashes, clock hash.
-- Arguments: hint_uid, incarnation, lease_id, free_blocks, block_size_tokens.
-- Answers: RESERVED with attempt, fence, seq, blocks, most_blocks and the prefill node | NOTHING, with queue_empty |
-- REFUSED | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end

local function reserved(r, held)
  return answer({
    status = 'RESERVED', uid = r.uid, client_id = r.client, attempt = r.attempt, fence = r.fence, blocks = held,
    most_blocks = blocks(r.prompt_tokens + r.max_tokens), seq = r.seq,
    prefill_incarnation = r.owner, prefill_address = redis.call('HGET', P .. 'node:' .. r.owner, 'address') or '',
  })
end

-- This call again, its first answer was lost. A lease id reserves once, never twice.
local l = redis.call('HMGET', P .. 'lease:' .. cmd.lease_id, 'state', 'node', 'uid', 'blocks')
if l[1] then
  local r = load(l[3])
  if r and l[1] == 'RESERVED' and l[2] == cmd.incarnation then return reserved(r, tonumber(l[4])) end
  return answer({ status = 'NOTHING' })
end
local node = worker(cmd.incarnation, 'decode')
if not node then return answer({ status = 'REFUSED' }) end

-- could: this node may take it now or once it has blocks. Who cannot is passed over, and holds nobody up.
local function candidate(uid)
  local c = redis.call('HMGET', P .. 'rec:' .. uid, 'state', 'lease', 'prompt_tokens', 'max_tokens', 'claimed_at',
    'suspect', 'owner', 'shunned', 'shunned_until', 'attempt')
  if c[1] ~= 'PREFILLING' or c[2] ~= '' then return nil end
  local most = blocks(tonumber(c[3]) + tonumber(c[4]))
  local need = math.min(blocks(tonumber(c[3]) + length(uid)) + 1, most)
  local could = most <= math.max(node.num_blocks, cmd.free_blocks)
    and not (node.suspect and (tonumber(c[6]) or 0) > 0)
    and not left_to_others({ owner = c[7], shunned = c[8], shunned_until = tonumber(c[9]), need = most }, node)
  return {
    could = could, fits = could and need <= cmd.free_blocks, waited = now - tonumber(c[5]), need = need,
    requeued = c[10] ~= '1',
  }
end

local function hinted()
  if cmd.hint_uid == '' or not redis.call('ZSCORE', P .. 'waiters', cmd.hint_uid) then return false end
  local c = candidate(cmd.hint_uid)
  return c and c.fits
end
local hint = hinted() and cmd.hint_uid or nil
local head
local uid = walk(P .. 'waiters', node, function(uids)
  local first
  for _, each in ipairs(uids) do
    local c = candidate(each)
    if not c then
      redis.call('ZREM', P .. 'waiters', each)
    elseif c.could then
      -- The oldest that this node could ever hold: once it has waited for long, blocks are kept free for it. Without
      -- this, small requests would take each block that comes free, and a large one would starve.
      if not head and c.waited >= PASSED_OVER_MS then
        if c.fits then return each end
        return nil, true
      end
      head = head or each
      if c.fits then
        first = first or each
        -- Whoever was preempted comes before those that came later.
        return not c.requeued and hint or first
      end
    end
  end
  return hint
end)
if not uid then return answer({ status = 'NOTHING', queue_empty = redis.call('ZCARD', P .. 'waiters') == 0 }) end

local r, need = load(uid), candidate(uid).need
redis.call('HSET', P .. 'lease:' .. cmd.lease_id, 'uid', uid, 'attempt', r.attempt, 'fence', r.fence,
  'node', cmd.incarnation, 'state', 'RESERVED', 'blocks', need, 'at', now)
redis.call('ZADD', P .. 'leases', now, cmd.lease_id)
redis.call('ZADD', P .. 'owned:' .. cmd.incarnation, now, 'l:' .. cmd.lease_id)
redis.call('ZREM', P .. 'waiters', uid)
hold_suspect(r, cmd.incarnation)
set(r, 'lease', cmd.lease_id, 'decode_node', node.name, 't:granted', wall_ms())
return reserved(r, need)
