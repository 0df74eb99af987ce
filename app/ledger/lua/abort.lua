-- Ends a request as ABORTED, whatever it is doing: all records of a group.
-- Touches: rec hash, tombstones zset, clock hash, and what end_request touches.
-- Arguments: uid, reason. Answers: ABORTED | ENDED state | TOMBSTONED | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
local r = load(cmd.uid)
if not r then
  -- Its admission may still be under way.
  stone(cmd.uid)
  return answer({ status = 'TOMBSTONED' })
end
for _, uid in ipairs(group_of(r)) do
  local each = uid == r.uid and r or load(uid)
  if each and in_process(each) then end_request(each, 'ABORTED', { error_code = cmd.reason }) end
end
return answer(end_of(r))
