-- Whose data these are, and a read of ledger time: run on connecting to a server life that this process has not met.
-- Touches: clock hash; looks whether there are keys without a version under names that we use.
-- No arguments. Answers: version, time_ms. Ours: the clock goes on, or starts in a namespace that is empty. A version
-- that this program does not read, or "" for data that name none: nothing was touched.
local version = redis.call('HGET', P .. 'clock', 'version')
if not version then
  local ours = {
    'clock', 'seq', 'queue', 'waiters', 'deadlines', 'rings', 'leases', 'nodes', 'model_nodes', 'unwatched', 'avoided',
    'avoided_times', 'tombstones', 'exited',
  }
  for _, name in ipairs(ours) do
    if redis.call('EXISTS', P .. name) == 1 then return answer({ version = '' }) end
  end
elseif not string.match(version, '^%d+$') or tonumber(version) < OLDEST or tonumber(version) > NEWEST then
  return answer({ version = version })
end
now = read_clock()
return answer({ version = int(VERSION) })
