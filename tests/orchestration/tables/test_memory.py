"""Builds with `memory_mb`: the table of a build in one step, to the bit, whatever the steps are."""

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import isthmus
from isthmus import ConfigurationError, DataError, GateFailed
from isthmus.features import clock
from isthmus.features.days import FIRST as FIRST_MOMENT
from isthmus.features.days import LAST as LAST_MOMENT
from isthmus.features.days import Days, day_of
from isthmus.features.offline.commits import Commit
from isthmus.features.offline.store import OfflineStore
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.server.collect import collect
from isthmus.orchestration.tables import memory
from isthmus.orchestration.tables.build import build, build_range
from isthmus.transforms import engine
from isthmus.transforms.views.compute import stream_view
from tests.features.support import DAY, same_bits, times
from tests.orchestration.shop import START, Open, Shop, files, order_rows

FIRST = START // DAY
VIEWS = ["customer_orders", "shelf_demand", "customer_facts"]
ALWAYS = Days(day_of(FIRST_MOMENT), day_of(LAST_MOMENT) + 1)
LEAST = 64 << 20
"""Bytes for rows of the engine with the least `memory_mb`."""


@pytest.fixture
def bounded(shop: Shop) -> Shop:
    """A project with the least memory, whose customer_orders looks back seven days, and shelf_demand two."""
    shop.replace("    ttl=timedelta(days=7),\n", "    ttl=timedelta(days=7),\n    lookback=timedelta(days=7),\n")
    shop.replace("    ttl=timedelta(days=3),\n", "    ttl=timedelta(days=3),\n    lookback=timedelta(hours=30),\n")
    shop.toml.write_text("memory_mb = 512\n" + shop.toml.read_text())
    return shop


def stored(shop: Shop, project: Open) -> dict[str, tuple[pa.Table, Commit]]:
    opened = project(shop)
    store = OfflineStore(opened.offline)
    tables = {}
    for name in VIEWS:
        history = store.history(opened.definitions.contract.views[name])
        store.require_unaltered(history)
        tables[name] = history.table(), replace(history.commit, written=0)
    return tables


def require_same(shop: Shop, project: Open, expected: dict[str, tuple[pa.Table, Commit]]) -> None:
    for name, (rows, commit) in stored(shop, project).items():
        assert same_bits(rows, expected[name][0]), name
        assert commit == expected[name][1], name


def in_one_step(shop: Shop, project: Open) -> dict[str, tuple[pa.Table, Commit]]:
    """Build without a limit; return the tables, and remove them."""
    bound, text = "memory_mb = 512\n", shop.toml.read_text()
    shop.toml.write_text(text.removeprefix(bound))
    apply(project(shop))
    build(project(shop))
    expected = stored(shop, project)
    shop.toml.write_text(text)
    (shop.state / "one-step").mkdir()
    for name in VIEWS:
        (shop.state / "offline" / name).rename(shop.state / "one-step" / name)
    return expected


def steps_of(told: list[str], view: str) -> int:
    return sum(text.startswith(f"computing {view}, step") for text in told)


def built(shop: Shop, project: Open, view_names: list[str] | None = None) -> list[str]:
    told: list[str] = []
    build(project(shop), view_names, progress=lambda text, _: told.append(text))
    return told


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.accept) for seed in range(1, 6))])
def test_steps_make_the_table_of_one_step(
    bounded: Shop, project: Open, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With sparse and dense days, and the first and the last moment that a date can have."""
    chance = random.Random(seed)
    orders = order_rows(seed=seed)
    day = pc.divide(pc.subtract(orders["ordered_at"].cast(pa.int64()), START), DAY)
    dense = pc.is_in(day, pa.array([n for n in range(59) if chance.random() < 0.8]))
    ends = orders.slice(0, 2)
    ends = ends.set_column(3, "ordered_at", times([-62_135_596_800_000_000, 253_402_300_799_999_999]))
    ends = ends.set_column(4, "delivered_at", ends["ordered_at"])
    pq.write_table(pa.concat_tables([orders.filter(dense), ends]), bounded.orders)
    expected = in_one_step(bounded, project)
    assert len(expected["customer_orders"][0]) == pc.sum(dense).as_py() + 2
    # About so many rows fit in a step.
    monkeypatch.setattr(memory, "VALUE", LEAST // 6 // chance.randrange(200, 1200))
    told = built(bounded, project)
    assert steps_of(told, "customer_orders") > 1
    assert steps_of(told, "shelf_demand") > 1
    require_same(bounded, project, expected)
    assert not built(bounded, project)[-1].startswith("computing")
    assert not list(bounded.state.glob("offline/_probe*"))


def test_a_range_of_days_in_steps(bounded: Shop, project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = in_one_step(bounded, project)
    monkeypatch.setattr(memory, "VALUE", LEAST // 6 // 300)
    told: list[str] = []
    for first, end in pairwise([FIRST - 400, FIRST + 20, FIRST + 61]):
        build_range(project(bounded), within=Days(first, end), step=30, progress=lambda text, _: told.append(text))
    assert steps_of(told, "customer_orders") > 2
    tables = stored(bounded, project)
    for name in VIEWS:
        assert same_bits(tables[name][0], expected[name][0])
        assert tables[name][1].fingerprint == expected[name][1].fingerprint


def test_pushed_rows_are_merged_on_days_with_and_without_others(
    bounded: Shop, project: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(project(bounded))
    opened = project(bounded)
    # Before, among and after the orders.
    moments = [clock.moment(START + days * DAY + 5) for days in (-3, 20, 59)]
    rows = {"customer": [1, 2, 3], "event_timestamp": moments, "orders_7d": [1, 2, 3],
            "mean_amount_7d": [0.5, None, 2.5], "late_rate_7d": [None, 1.0, 0.0]}  # fmt: skip
    with opened.redis():
        isthmus.push(opened, "customer_orders", rows, to="offline")
        collect(opened)
        expected = in_one_step(bounded, project)
        monkeypatch.setattr(memory, "VALUE", LEAST // 6 // 300)
        written = build(project(bounded))["customer_orders"]
        assert (written.rows, written.pushed, written.replaced) == (2403, 3, 0)
        require_same(bounded, project, expected)


@given(
    counts=st.dictionaries(st.integers(-9, 9) | st.integers(-700_000, 2_000_000), st.integers(1, 50), max_size=12),
    lookback=st.none() | st.integers(0, 4 * DAY),
    most=st.integers(1, 100),
    range_=st.none() | st.tuples(st.integers(-12, 12), st.integers(1, 12)),
)
def test_steps_cover_all_days_and_fit(
    counts: dict[int, int], lookback: int | None, most: int, range_: tuple[int, int] | None
) -> None:
    days = None if range_ is None else Days(range_[0], range_[0] + range_[1])
    parts, longest = memory.steps(counts, days, lookback, most)
    if lookback is None:
        assert (parts, longest) == ([days], sum(counts.values()))
        return
    ranges = [part for part in parts if part is not None]
    assert len(ranges) == len(parts)
    assert all(ranges)
    assert all(a.end == b.first for a, b in pairwise(ranges))
    assert Days(ranges[0].first, ranges[-1].end) == (days or ALWAYS)
    reach = -(-lookback // DAY)
    around = [Days(part.first - reach, part.end + reach) for part in ranges]
    sizes = [sum(rows for day, rows in counts.items() if day in part) for part in around]
    assert longest == max(sizes)
    # A larger step is as short as a step may be.
    known = Days(min(counts, default=0), max(counts, default=0) + 1)
    inner = [Days(max(part.first, known.first), min(part.end, known.end)) if days is None else part for part in ranges]
    assert all(size <= most or len(part) <= max(reach, 1) for size, part in zip(sizes, inner, strict=True))


def test_a_lookback_that_is_too_short_is_refused(bounded: Shop, project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded.replace("lookback=timedelta(days=7)", "lookback=timedelta(days=3)")
    apply(project(bounded))
    build(project(bounded))
    before = files(bounded.state / "offline")
    monkeypatch.setattr(memory, "VALUE", LEAST // 6 // 300)
    pq.write_table(order_rows(seed=1), bounded.orders)
    with pytest.raises(DataError, match="customer_orders: reads beyond its lookback of 3 days: with a longer one"):
        build(project(bounded))
    assert {name: text for name, text in files(bounded.state / "offline").items() if "_delta_log" in name} == {
        name: text for name, text in before.items() if "_delta_log" in name
    }


def test_what_does_not_fit_is_said(bounded: Shop, project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view without a lookback has one step; a step is never shorter than its look-back."""
    bounded.replace("    lookback=timedelta(hours=30),\n", "")
    expected = in_one_step(bounded, project)
    monkeypatch.setattr(memory, "VALUE", LEAST // 60)
    told = built(bounded, project)
    (whole,) = [text for text in told if text.startswith("shelf_demand: ")]
    assert whole == (
        "shelf_demand: a step reads 2,400 source rows because the view has no lookback; the engine may use temporary "
        "files. Set memory_mb to 31,104 to avoid this"
    )
    (long,) = [text for text in told if text.startswith("customer_orders: a step")]
    assert "source rows with its look-back; the engine may use temporary files. Set memory_mb to" in long
    assert steps_of(told, "customer_orders") == 9
    assert not steps_of(told, "shelf_demand")
    require_same(bounded, project, expected)


def test_expectations_see_the_rows_of_all_steps(bounded: Shop, project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded.replace("    Entity,\n", "    Entity,\n    Expect,\n")
    bounded.replace("ttl=timedelta(days=7)", "ttl=timedelta(days=7), expectations=[Expect.rows(at_least=2401)]")
    apply(project(bounded))
    monkeypatch.setattr(memory, "VALUE", LEAST // 6 // 300)
    with pytest.raises(GateFailed, match="2,400 rows; expected"):
        build(project(bounded))
    assert not list((bounded.state / "offline").glob("*/_delta_log"))
    bounded.replace("at_least=2401", "at_least=2400")
    apply(project(bounded))
    build(project(bounded))
    pq.write_table(pa.concat_tables([order_rows(), order_rows().slice(100, 3)]), bounded.orders)
    with pytest.raises(DataError, match="view customer_orders: 3 rows have the key and times of another row, first"):
        build(project(bounded))
    pq.write_table(order_rows().filter(pa.array([False] * 2400)), bounded.orders)
    with pytest.raises(DataError, match=r"source orders: .* has no rows"):
        build(project(bounded))


KILLED = """
import os, signal, sys
from pathlib import Path
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables import memory
from isthmus.orchestration.tables.build import build

memory.VALUE = int(sys.argv[1])

def progress(text, _):
    if text.startswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

build(Project(Path.cwd()), progress=progress)
"""


@pytest.mark.accept
def test_a_kill_between_steps_leaves_the_old_table(
    bounded: Shop, project: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = in_one_step(bounded, project)
    for name in VIEWS:
        (bounded.state / "one-step" / name).rename(bounded.state / "offline" / name)
    (bounded.state / "one-step").rmdir()
    pq.write_table(order_rows(seed=1), bounded.orders)
    value = LEAST // 6 // 300
    for place in ("computing customer_orders, step 2", "computing customer_orders, step 4", "computing shelf_demand"):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(value), place], cwd=bounded.root, check=False, capture_output=True
        )
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        require_same(bounded, project, old)
    monkeypatch.setattr(memory, "VALUE", value)
    build(project(bounded))
    stepped = stored(bounded, project)
    (bounded.state / "offline").rename(bounded.state / "stepped")
    expected = in_one_step(bounded, project)
    for name in VIEWS:
        assert same_bits(stepped[name][0], expected[name][0])
        assert stepped[name][1].fingerprint == expected[name][1].fingerprint


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("0", "memory_mb: 0; expected greater than or equal to 512"),
        ("-1000", "memory_mb: -1000; expected greater than or equal to 512"),
        ("511", "memory_mb: 511; expected greater than or equal to 512"),
        ('"much"', "memory_mb: 'much'; expected a whole number"),
        ("1000.5", "memory_mb: 1000.5; expected a whole number"),
        ("[1]", r"memory_mb: [1]; expected a whole number"),
    ],
)
def test_a_bound_that_is_none(shop: Shop, project: Open, value: str, problem: str) -> None:
    shop.toml.write_text(f"memory_mb = {value}\n" + shop.toml.read_text())
    with pytest.raises(ConfigurationError) as caught:
        project(shop)
    assert [str(each) for each in caught.value.problems] == [problem]


def test_the_engine_uses_files_and_says_what_it_lacks(shop: Shop, project: Open) -> None:
    def limits() -> dict[str, str]:
        return {name: text for name, text in os.environ.items() if "MEMORY_POOL" in name or "PARALLELISM" in name}

    before = limits()
    with engine.session("sail", memory=64 << 20) as spark:
        # 118 MB of text.
        rows = spark.range(1_000_000).selectExpr("id", "id % 999 AS key", "repeat(cast(id AS string), 20) AS text")
        ranked = rows.selectExpr("*", "row_number() OVER (PARTITION BY key ORDER BY id) AS rank")
        (found,) = ranked.selectExpr("sum(rank)", "sum(length(text))").collect()
    assert tuple(found) == (501_000_501, 117_777_800)
    opened = project(shop)
    view = opened.definitions.views["customer_orders"]
    contract = opened.definitions.contract.views["customer_orders"]
    with engine.session("sail", memory=3 << 20) as spark:
        frames = {"orders": spark.read.parquet(str(shop.orders))}
        with pytest.raises(DataError, match=r"the engine refused it: .*\(pool_size.* Raise memory_mb in isthmus.toml,"):
            list(stream_view(view, contract, frames))
    assert limits() == before


def test_no_rows_in_any_step(bounded: Shop, project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded.replace(
        'return orders.select(\n        "store"', 'return orders.where("cents < 0").select(\n        "store"'
    )
    apply(project(bounded))
    monkeypatch.setattr(memory, "VALUE", LEAST // 6 // 300)
    with pytest.raises(DataError, match=r"view shelf_demand.*: returned no rows; expected at least one"):
        build(project(bounded), ["shelf_demand"])
    # A range may be empty.
    built = build_range(project(bounded), ["shelf_demand"], within=Days(FIRST, FIRST + 40))
    assert built["shelf_demand"].rows == 0
