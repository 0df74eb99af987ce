-- QUEUED -> PREFILLING for one record that fits a prefill node.
-- Touches: fence string, nodes, queue, rings, deadlines, waiters, owned zsets, node, rec and clock hashes, model_nodes
-- set, tok list.
-- Arguments: hint_uid, incarnation, fence, free_blocks, block_size_tokens, stamp.
-- Answers: CLAIMED work | NOTHING, with queue_empty | REFUSED | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end

-- This call again, its first answer was lost. A fence starts one attempt, never two.
local claimed = redis.call('GET', P .. 'fence:' .. cmd.fence)
if claimed then
  local r = load(claimed)
  if r and r.fence == cmd.fence and r.owner == cmd.incarnation and r.state == 'PREFILLING' then
    return answer({ status = 'CLAIMED', work = work(r) })
  end
  return answer({ status = 'NOTHING' })
end
local node = worker(cmd.incarnation, 'prefill')
if not node then return answer({ status = 'REFUSED' }) end

-- could: this node may take it now or once it has blocks. Who cannot is passed over, and holds nobody up.
local function candidate(uid)
  local c = redis.call('HMGET', P .. 'rec:' .. uid, 'state', 'total', 'queued_at', 'seq', 'attempt', 'suspect',
    'shunned_prefill', 'shunned_until')
  if c[1] ~= 'QUEUED' then return nil end
  local need = blocks(tonumber(c[2]))
  local could = need <= math.max(node.num_blocks, cmd.free_blocks)
    and not (node.suspect and (tonumber(c[6]) or 0) > 0)
    and not left_to_other_prefill({ shunned_prefill = c[7], shunned_until = tonumber(c[8]), need = need }, node)
  return {
    could = could, fits = could and need <= cmd.free_blocks, waited = now - tonumber(c[3]), seq = tonumber(c[4]),
    requeued = c[5] ~= '1',
  }
end

local hinted = cmd.hint_uid ~= '' and candidate(cmd.hint_uid)
if hinted and not hinted.fits then hinted = nil end
local head
local uid = walk(P .. 'queue', node, function(uids)
  local first
  for _, each in ipairs(uids) do
    if hinted and each == cmd.hint_uid then return each end
    local c = candidate(each)
    if c and hinted and c.seq > hinted.seq then return cmd.hint_uid end
    -- The oldest that this node could ever hold: see reserve_next.
    if c and c.could and not c.fits and not head and c.waited > PASSED_OVER_MS then return nil, true end
    head = head or (c and c.could)
    if c and c.fits then
      first = first or each
      if not hinted or c.waited > PASSED_OVER_MS then return first end
    end
    -- Whoever came later and was never requeued has waited for less than this one: nobody is passed over by the hint.
    -- Those requeued with an older number stand before it and have been looked at.
    if c and hinted and not c.requeued and c.waited <= PASSED_OVER_MS then return cmd.hint_uid end
  end
  -- A hint that lies further back than the walk goes: nobody in front of it has waited for long.
  return hinted and cmd.hint_uid or nil
end)
if not uid then return answer({ status = 'NOTHING', queue_empty = redis.call('ZCARD', P .. 'queue') == 0 }) end

local r = load(uid)
r.state, r.fence, r.owner, r.lease = 'PREFILLING', cmd.fence, cmd.incarnation, ''
set(r, 'state', r.state, 'fence', r.fence, 'owner', r.owner, 'lease', '', 'claimed_at', now,
  'waited', r.waited + now - r.queued_at, 'prefill_node', node.name, 'decode_node', '', 't:claimed', wall_ms(),
  'stamped', cmd.stamp and 1 or 0)
hold_suspect(r, cmd.incarnation)
redis.call('SET', P .. 'fence:' .. cmd.fence, uid)
redis.call('ZREM', P .. 'queue', uid)
redis.call('ZREM', P .. 'rings', uid)
redis.call('ZADD', P .. 'deadlines', now + r.first_token_timeout, uid)
redis.call('ZADD', P .. 'owned:' .. cmd.incarnation, now, 'c:' .. uid)
-- A single token to come is sampled by prefill itself: no decode node is needed.
if r.max_tokens - length(uid) > 1 then redis.call('ZADD', P .. 'waiters', r.seq, uid) end
return answer({ status = 'CLAIMED', work = work(r) })
