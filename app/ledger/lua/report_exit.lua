-- A supervisor saw the process end. Dead first, then its attempts are ended, so that nothing is added meanwhile; what
-- is beyond the bound of one call is left to the scans. Exempt from not_after: an exit is final.
-- Touches: exited, nodes, owned, room, avoided zsets, node, avoided_times and clock hashes, model_nodes set, and what
-- end_attempt, end_request and unwatch touch.
-- Arguments: incarnation. Answers like scan.
now = read_clock()
-- A register of that process may still be under way.
redis.call('ZADD', P .. 'exited', now + STONE_MS, cmd.incarnation)
if not redis.call('ZSCORE', P .. 'nodes', cmd.incarnation) then return answer({ ran = true }) end
local recovered, bells = {}, {}
declare_dead(cmd.incarnation)
local _, left = bury(cmd.incarnation, PER_KIND, recovered)
for _, uid in ipairs(recovered) do
  local r = load(uid)
  if r and r.state == 'QUEUED' then bells[#bells + 1] = ring(r) end
end
return answer({ ran = true, recovered = recovered, bells = bells, dead = { cmd.incarnation }, more = left })
