-- Whose data these are, and a read of ledger time: run on connecting to a server life that this process has not met.
-- Touches: meta hash, clock hash; looks whether there are keys without a schema under names that we use.
-- No arguments. Answers: schema, time_ms. Ours: the clock goes on, or starts in a namespace that is empty. Another
-- schema, or "" for data that name none: nothing was touched.
local theirs = redis.call('HGET', P .. 'meta', 'schema')
if not theirs then
  local ours = {
    'meta', 'clock', 'seq', 'queue', 'waiters', 'deadlines', 'rings', 'leases', 'nodes', 'model_nodes', 'unwatched',
    'avoided', 'avoided_times', 'tombstones', 'exited',
  }
  for _, name in ipairs(ours) do
    if redis.call('EXISTS', P .. name) == 1 then return answer({ schema = '' }) end
  end
elseif theirs ~= int(SCHEMA) then
  return answer({ schema = theirs })
end
now = read_clock()
return answer({ schema = int(SCHEMA) })
