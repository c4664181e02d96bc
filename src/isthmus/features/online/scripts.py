"""Lua scripts with which Redis decides which rows replace stored rows, so that writers may run in any order.

A pushed row is a row that does not come from the offline table. `push_steps` tells how to write such rows.
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
"""Maximum number of pushed keys recorded one by one. Beyond it, the next materialization compares every row."""

# Decide which rows replace stored rows. Lua's numbers are doubles, which hold microseconds only to the year 2255:
# the 64-bit header numbers are compared as a signed and an unsigned half.
#
# The second argument is one of: the horizon of the offline table, which overrules all rows known by then (8 bytes); the
# stamp of the view, for pushed rows (24 bytes); empty. A pushed row whose times the stamp would replace is not written.
#
# The third count is the number of stored rows that stay because they became known after the horizon.
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

# Remove the rows of a view that were written under another contract, or were known by the horizon. Reply with the
# numbers of removed and of remaining rows.
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

# Record the keys of pushed rows by known time. Beyond the limit, record only the newest key, and "*" for too many.
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


# Replace the record of a view, unless another process has replaced it meanwhile.
REPLACE = Script("""
local current = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if current == ARGV[3] then return {1} end
if current ~= ARGV[2] then return {0} end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return {1}
""")


def suspects_key(project: str, view: str) -> bytes:
    return record.view_key(project, view, "suspects")


def lock_key(project: str, view: str) -> bytes:
    return record.view_key(project, view, "lock")


def announce_arguments(names: Sequence[bytes], known: Ints) -> list[bytes]:
    return [part for name, time in zip(names, known.tolist(), strict=True) for part in (b"%d" % time, name)]


class PushStep(Enum):
    READ = "read the record"
    ANNOUNCE = "announce the keys"


def push_steps(view: ViewContract) -> Generator[PushStep | bytes, Any, Any]:
    """Yield the steps that write pushed rows to Redis, safe even while a materialization is running.

    This generator does no I/O, so that synchronous and asynchronous callers can share it. The caller performs each
    step, and passes its result by `send`:

    * `PushStep.READ`: read the view's record; send it, or None.
    * `PushStep.ANNOUNCE`: run the script `ANNOUNCE` over the keys, so that the next materialization checks them.
    * bytes: run the script `WRITE` over the rows, with the bytes as second argument; send its counts, which are also
      the generator's return value.
    """
    # Without a record, the next materialization compares every row.
    before = yield PushStep.READ
    if before is not None:
        yield PushStep.ANNOUNCE
    stamp = record.stamp_of(view, before)
    counts = yield b"" if stamp is None else struct.pack("<qqq", stamp.until, stamp.event, stamp.known)
    if before is not None or (yield PushStep.READ) is not None:
        # Again: a running materialization may have checked these keys before their rows were written.
        yield PushStep.ANNOUNCE
    return counts
