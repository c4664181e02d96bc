"""What Redis itself decides, for many rows in one call: which rows replace what is stored, and which are removed.

Batch, streaming and pushes may so write at once, in any order, and end in the same state.
"""

import struct
from collections.abc import Sequence

from isthmus.features.online import record
from isthmus.features.redis.pipeline import Script
from isthmus.features.values.rows import Int64
from isthmus.features.values.stamp import Stamp

MANY = 100_000
"""Keys that others have written of which each is remembered, until a materialization has looked at them."""

# Decides for many rows in one call which of them replace what is stored. Lua's numbers are doubles, which hold
# microseconds only to the year 2255: the 64-bit header numbers are compared as a signed and an unsigned half.
#
# The second argument is the horizon of a table, which decides about all that was known by then (8 bytes), or the stamp
# of the view for rows that come from elsewhere (24 bytes), or nothing. A row from elsewhere that would get the times of
# the stamp instead of its own is not written, be there another one or none.
#
# The third count is of rows from elsewhere that stay because they became known after the horizon.
WRITE = Script("""
local field, decided, stamped = ARGV[1], #ARGV[2] == 8, #ARGV[2] == 24
local sub, unpack, call = string.sub, struct.unpack, redis.call
local hl, hh = 0, 0
if decided or stamped then hl, hh = unpack('<I4i4', ARGV[2]) end
local changed, written, kept = 0, 0, 0
local function later(row)
  local l, h = unpack('<I4i4', row, 18)
  return h > hh or (h == hh and l > hl)
end
local function newer(new, old)
  if stamped and not later(old) then old = sub(old, 1, 9) .. sub(ARGV[2], 9, 24) .. sub(old, 26, 33) end
  for place = 10, 26, 8 do
    local l, h = unpack('<I4i4', new, place)
    local was_l, was_h = unpack('<I4i4', old, place)
    if h ~= was_h then return h > was_h end
    if l ~= was_l then return l > was_l end
  end
  return false
end
for i, key in ipairs(KEYS) do
  local new = ARGV[i + 2]
  local old = call('HGET', key, field)
  local write, differs = true, true
  if old == new or (stamped and not later(new)) then
    write = false
  elseif old and #old >= 33 and sub(old, 1, 9) == sub(new, 1, 9) then
    differs = sub(old, 26, 33) ~= sub(new, 26, 33)
    if not decided or later(old) then write = newer(new, old) end
    if decided and not write then kept = kept + 1 end
  end
  if write then
    call('HSET', key, field, new)
    written = written + 1
    if differs then changed = changed + 1 end
  end
end
return {changed, written, kept}
""")

# Removes the rows of a view that stand under another contract, or became known no later than the horizon. The second
# count is of those that stay.
REMOVE = Script("""
local field, prefix = ARGV[1], ARGV[2]
local hl, hh = struct.unpack('<I4i4', ARGV[3])
local removed, kept = 0, 0
for _, key in ipairs(KEYS) do
  local row = redis.call('HGET', key, field)
  if row then
    local old = #row < 33 or string.sub(row, 1, 9) ~= prefix
    if not old then
      local l, h = struct.unpack('<I4i4', row, 18)
      old = h < hh or (h == hh and l <= hl)
    end
    if old then removed = removed + redis.call('HDEL', key, field) else kept = kept + 1 end
  end
end
return {removed, kept}
""")

# Notes which keys others than the table have written, by when the rows became known. Of too many, only that there are.
ANNOUNCE = Script(f"""
local call, set = redis.call, KEYS[1]
if call('ZSCORE', set, '*') then return {{0}} end
if call('ZCARD', set) + #ARGV / 2 > {MANY} then
  call('DEL', set)
  call('ZADD', set, '+inf', '*')
  return {{0}}
end
for i = 1, #ARGV, 1000 do call('ZADD', set, 'GT', unpack(ARGV, i, math.min(i + 999, #ARGV))) end
return {{#ARGV / 2}}
""")


# Replaces the record of a view by another one, unless somebody else has done so meanwhile.
REPLACE = Script("""
local told = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if told == ARGV[3] then return {1} end
if told ~= ARGV[2] then return {0} end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return {1}
""")


def suspects(project: str, view: str) -> bytes:
    """The name of the sorted set of keys that others have written."""
    return record.beside(project, view, "suspects")


def locked(project: str, view: str) -> bytes:
    """The name of what one materialization at a time holds."""
    return record.beside(project, view, "lock")


def announced(names: Sequence[bytes], known: Int64) -> list[bytes]:
    """The arguments of `ANNOUNCE` for rows, shape (n,) int64 microseconds when they became known."""
    return [part for name, time in zip(names, known.tolist(), strict=True) for part in (b"%d" % time, name)]


def rule_of(stamp: Stamp | None) -> bytes:
    """The rule for `WRITE` of rows that do not come from the table."""
    return b"" if stamp is None else struct.pack("<qqq", stamp.until, stamp.event, stamp.known)
