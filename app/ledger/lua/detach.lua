-- Removes one watcher, of all records of a group; the last one gone aborts the request, after its grace.
-- Touches: rec hash, watch set, owned, unwatched and tombstones zsets, clock hash, and what end_request touches.
-- Arguments: uid, web, connection. Answers: WATCHED state | GRACE state | ABORTED | ENDED state | TOMBSTONED | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
local r = load(cmd.uid)
if not r then
  stone(cmd.uid)
  return answer({ status = 'TOMBSTONED' })
end
local said
for _, uid in ipairs(group_of(r)) do
  local each = load(uid)
  if each and in_process(each) then
    local status = unwatch(each, cmd.web, cmd.connection, 'client_gone')
    said = { status = status, state = each.state }
  end
end
return answer(said or end_of(r))
