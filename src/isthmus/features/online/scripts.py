"""The Lua scripts: Redis itself decides which rows replace what is stored, and which are removed.

So batch, streaming and pushes may write at the same time, in any order, and end in the same state. Rows that come from
anywhere but the offline table are called pushed. The history has those that were appended to its stream (`pushes`).
"""

import struct
from collections.abc import Generator, Sequence
from enum import Enum
from typing import Any

from isthmus.features.contract.schema import ViewContract
from isthmus.features.online import record
from isthmus.features.redis.routing import Script
from isthmus.features.values.columns import Ints

MANY = 100_000
"""Keys of pushed rows that are remembered one by one, until a materialization has looked at them."""

# Decides which rows replace what is stored. Lua's numbers are doubles, which hold microseconds only to the year 2255:
# the 64-bit header numbers are compared as a signed and an unsigned half.
#
# The second argument is the horizon of a table, which decides about all that was known by then (8 bytes), or the stamp
# of the view for pushed rows (24 bytes), or nothing. A pushed row that would get the times of the stamp instead of its
# own is not written, whatever is stored.
#
# The third count is of pushed rows that stay because they became known after the horizon.
WRITE = Script("""
local field, decided, stamped = ARGV[1], #ARGV[2] == 8, #ARGV[2] == 24
local sub, unpack, call = string.sub, struct.unpack, redis.call
local hl, hh = 0, 0
if decided or stamped then hl, hh = unpack('<I4i4', ARGV[2]) end
local changed, written, stay = 0, 0, 0
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
    if decided and not write then stay = stay + 1 end
  end
  if write then
    call('HSET', key, field, new)
    written = written + 1
    if differs then changed = changed + 1 end
  end
end
return {changed, written, stay}
""")

# Removes the rows of a view that were written under another contract, or became known no later than the horizon. The
# second count is of those that stay.
REMOVE = Script("""
local field, prefix = ARGV[1], ARGV[2]
local hl, hh = struct.unpack('<I4i4', ARGV[3])
local removed, stay = 0, 0
for _, key in ipairs(KEYS) do
  local row = redis.call('HGET', key, field)
  if row then
    local old = #row < 33 or string.sub(row, 1, 9) ~= prefix
    if not old then
      local l, h = struct.unpack('<I4i4', row, 18)
      old = h < hh or (h == hh and l <= hl)
    end
    if old then removed = removed + redis.call('HDEL', key, field) else stay = stay + 1 end
  end
end
return {removed, stay}
""")

# Notes the keys of pushed rows by when the rows became known. Of too many, it notes the newest, and that they are too
# many.
ANNOUNCE = Script(f"""
local call, set = redis.call, KEYS[1]
if call('ZSCORE', set, '*') or call('ZCARD', set) + #ARGV / 2 > {MANY} then
  local newest = 1
  for i = 3, #ARGV, 2 do
    if tonumber(ARGV[i]) > tonumber(ARGV[newest]) then newest = i end
  end
  if ARGV[newest] then call('ZADD', set, 'GT', ARGV[newest], ARGV[newest + 1]) end
  call('ZADD', set, '+inf', '*')
  call('ZREMRANGEBYRANK', set, 0, -3)
  return {{0}}
end
for i = 1, #ARGV, 1000 do call('ZADD', set, 'GT', unpack(ARGV, i, math.min(i + 999, #ARGV))) end
return {{#ARGV / 2}}
""")


# Replaces the record of a view, unless somebody else has done so meanwhile.
REPLACE = Script("""
local current = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if current == ARGV[3] then return {1} end
if current ~= ARGV[2] then return {0} end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return {1}
""")


def suspects(project: str, view: str) -> bytes:
    """The Redis key of the sorted set of keys whose rows were pushed; of a view by its online name."""
    return record.beside(project, view, "suspects")


def locked(project: str, view: str) -> bytes:
    """The Redis key that a materialization holds as its lock."""
    return record.beside(project, view, "lock")


def announced(names: Sequence[bytes], known: Ints) -> list[bytes]:
    """The arguments of `ANNOUNCE` for rows that became known at these times, shape (n,) int64 microseconds."""
    return [part for name, time in zip(names, known.tolist(), strict=True) for part in (b"%d" % time, name)]


class PushStep(Enum):
    """A step of `push_steps` besides the write itself."""

    READ = "read the record"
    ANNOUNCE = "announce the keys"


def push_steps(view: ViewContract) -> Generator[PushStep | bytes, Any, Any]:
    """The protocol by which pushed rows are written beside a materialization; returns the counts of `WRITE`.

    The caller does what each step says: for `READ` it sends back the record, for a `WRITE` by the rule that is yielded
    the counts.
    """
    # Without a record, the next run looks at every row that is there.
    before = yield PushStep.READ
    if before is not None:
        yield PushStep.ANNOUNCE
    stamp = record.stamp_of(view, before)
    counts = yield b"" if stamp is None else struct.pack("<qqq", stamp.until, stamp.event, stamp.known)
    if before is not None or (yield PushStep.READ) is not None:
        # Once more: a materialization under way may have looked at these keys before their rows came.
        yield PushStep.ANNOUNCE
    return counts
