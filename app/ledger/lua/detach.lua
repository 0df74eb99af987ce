-- Removes one watcher; the last one gone aborts the request, after its grace.
-- Touches: rec hash, watch set, owned, unwatched and tombstones zsets, clock hash, and what end_request touches.
-- Arguments: uid, web, connection. Answers: WATCHED state | GRACE state | ABORTED | ENDED state | TOMBSTONED | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
local r = load(cmd.uid)
if not r then
  stone(cmd.uid)
  return answer({ status = 'TOMBSTONED' })
end
if in_process(r) then
  local status = unwatch(r, cmd.web, cmd.connection, 'client_gone')
  return answer({ status = status, state = r.state })
end
return answer({ status = r.state == 'ABORTED' and 'ABORTED' or 'ENDED', state = r.state })
