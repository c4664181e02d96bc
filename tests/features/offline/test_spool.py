import random
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.days import Days
from isthmus.features.offline import spool
from isthmus.features.offline.spool import DaySpool
from tests.features.support import DAY, times


def _table(days: list[int], seed: int) -> pa.Table:
    chance = random.Random(seed)
    return pa.table({
        "n": pa.array(range(len(days)), pa.int64()),
        "text": pa.array([f"é{n}" * (n % 3) or None for n in range(len(days))], pa.string()),
        "event_timestamp": times([day * DAY + chance.randrange(DAY) for day in days]),
    })  # fmt: skip


@given(
    batches=st.lists(st.lists(st.integers(-3, 3), max_size=12), max_size=6),
    limit=st.sampled_from([1, 100, 500, spool.LIMIT]),
    group=st.sampled_from([1, 5, spool.GROUP]),
    first=st.integers(-4, 4),
)
def test_rows_come_back_by_day(batches: list[list[int]], limit: int, group: int, first: int) -> None:
    tables = [_table(days, n) for n, days in enumerate(batches)]
    rows = [row for table in tables for row in table.to_pylist()]
    with pytest.MonkeyPatch.context() as patch, DaySpool(limit) as found:
        patch.setattr(spool, "GROUP", group)
        for table in tables:
            found.add(table)
        assert found.rows == len(rows)
        groups = [table.to_pylist() for table in found.groups()]
        later = [row for table in found.groups(Days(first, 4)) for row in table.to_pylist()]
    days = [{row["event_timestamp"].date() for row in part} for part in groups]
    assert all(a.isdisjoint(b) for n, a in enumerate(days) for b in days[n + 1 :])
    assert [row for part in groups for row in part] == sorted(rows, key=lambda row: row["event_timestamp"].date())
    start = first * DAY
    assert later == [row for part in groups for row in part if row["event_timestamp"].timestamp() * 1e6 >= start]


def test_what_is_beyond_the_limit_lies_on_disk_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = _table([n % 7 for n in range(5000)], 1)
    before = pa.total_allocated_bytes()
    with DaySpool(limit=10_000) as found:
        for start in range(0, 5000, 50):
            found.add(rows.slice(start, 50))
        files = list(tmp_path.rglob("*.arrow"))
        assert len(files) > 3
        assert sum(file.stat().st_size for file in files) > rows.nbytes // 2
        assert pa.total_allocated_bytes() - before < rows.nbytes // 2
        assert sum(map(len, found.groups())) == 5000
    assert not list(tmp_path.iterdir())
