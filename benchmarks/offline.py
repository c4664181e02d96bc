"""Compare the offline store with Feast: point-in-time joins, and Redis writes for a table that changed a little.

Each join runs in a fresh process; the cases alternate, and the median of the rounds is reported. All values of all
results are checked against a range join, the definition of the result. Joins run in two variants: with one time column,
as Polars and Feast's defaults support, and with `created` as the time from which a row may be used.

`--only upkeep` commits 100 times a day to a table, maintains it every day, and compares reads with those of a table
with the same rows in one commit. Versions stay for ten days; every 500th stays as if a training set needed it.

Needs `redis-server` and Java 17. Run it on an idle machine.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from offline_data import COLUMNS, changed, write_tables
from online import writes
from online_data import START, feast_project, our_project
from online_data import write_tables as write_online_tables
from processes import free_port, last_json, redis_server
from result import Comparison, at_most, less, note, options_parser, plain_figure, report

from isthmus.features.days import DAY, Days
from isthmus.features.offline.pushes import ACCEPTED, CONTRACT
from isthmus.features.offline.store import OfflineStore
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.maintenance.upkeep import maintain, space
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize

JOBS = Path(__file__).with_name("offline_jobs.py")
NAMES = {
    "embedded": "embedded", "sail": "on Sail", "spark": "on Apache Spark",
    "feast_file": "Feast, file store",
    "feast_duckdb": "Feast, DuckDB store", "feast_spark": "Feast, Spark store", "polars": "Polars join_asof",
    "duckdb_asof": "DuckDB ASOF join", "duckdb_range": "DuckDB range join",
}  # fmt: skip
PAIRS: dict[bool, list[tuple[str, str, float | None]]] = {
    False: [
        ("embedded", "feast_duckdb", 1.5), ("embedded", "polars", 0.5), ("embedded", "duckdb_asof", None),
        ("embedded", "feast_file", None), ("spark", "feast_spark", 4.0), ("sail", "feast_spark", 4.0),
    ],
    True: [
        ("embedded", "feast_duckdb", 1.5), ("embedded", "duckdb_range", None), ("embedded", "feast_file", None),
        ("spark", "feast_spark", 4.0), ("sail", "feast_spark", 4.0),
    ],
}  # fmt: skip
"""Our case, the peer's case and the target ratio; by whether `created` is used."""


def main() -> int:
    parser = options_parser(__doc__, "one round over small tables")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["joins", "writes", "upkeep"])
    parser.add_argument("--commits", type=int, default=5_000, help="commits of the upkeep; 36500 are a year")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    rows, questions, users = (50_000, 5_000, 5_000) if options.quick else (1_000_000, 100_000, 100_000)
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        if options.only in (None, "joins"):
            write_tables(folder, rows, questions)
            for cutoff in (False, True):
                comparisons += joins(folder, rounds, questions, cutoff=cutoff)
        if options.only in (None, "writes"):
            write_online_tables(folder, {"stats": users, "wide": 10})
            comparisons += writes(folder / "writes", folder, users, rounds)
            comparisons += rewrites(folder / "rewrites", folder)
        if options.only in (None, "upkeep"):
            comparisons += upkeeps(folder, 500 if options.quick else options.commits)
    return report("offline", comparisons, as_json=options.json, quick=options.quick)


def joins(folder: Path, rounds: int, spine_rows: int, *, cutoff: bool) -> list[Comparison]:
    variant = "two times" if cutoff else "one time"
    cases = list(dict.fromkeys(case for pair in PAIRS[cutoff] for case in pair[:2]))
    reference, out = folder / "reference.parquet", folder / "out.parquet"
    run_job("duckdb_range", folder, reference, cutoff=cutoff)
    figures: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(rounds):
        for case in cases:
            out.unlink(missing_ok=True)
            figure = {**run_job(case, folder, out, cutoff=cutoff), **errors(out, reference)}
            note(f"{variant}, {NAMES[case]}: {figure}")
            figures[case].append(figure)
    middle = {case: {k: statistics.median([f[k] for f in runs]) for k in runs[0]} for case, runs in figures.items()}
    comparisons = []
    for ours, peer, bar in PAIRS[cutoff]:
        case = f"join, {variant}, {NAMES[ours]}"
        comparisons.append(less(case, "s", middle[ours]["seconds"], middle[peer]["seconds"], NAMES[peer], bar))
        comparisons.append(less(f"{case}: memory", "MB", middle[ours]["peak_mb"], middle[peer]["peak_mb"], NAMES[peer]))
    for case in cases:
        wrong = max(figure["lost"] + figure["wrong"] for figure in figures[case])
        named = f"join, {variant}, {NAMES[case]}: rows lost or wrong of {spine_rows:,}"
        own = not case.startswith(("feast", "polars", "duckdb"))
        comparisons.append(at_most(named, "rows", wrong, 0) if own else plain_figure(named, "rows", wrong))
    return comparisons


def run_job(case: str, folder: Path, out: Path, *, cutoff: bool) -> dict[str, Any]:
    command = [sys.executable, str(JOBS), case, str(folder), str(out), *(["--cutoff"] if cutoff else [])]
    return last_json(command, {"HOME": str(folder)})


def errors(out: Path, reference: Path) -> dict[str, float]:
    """Count the spine rows that a result lacks, and its rows with a wrong value."""
    # Feast returns NaN for missing values; the tables contain no NaN.
    value = "CASE WHEN isnan({0}.{1}::FLOAT) THEN NULL ELSE {0}.{1}::FLOAT END".format
    differs = " OR ".join(f"{value('f', column)} IS DISTINCT FROM e.{column}" for column in COLUMNS)
    counts = f"""
        SELECT count(*) FILTER (f.row_id IS NULL), count(*) FILTER (f.row_id IS NOT NULL AND ({differs})),
               count(*) - count(DISTINCT e.row_id)
        FROM '{reference}' e LEFT JOIN '{out}' f ON e.row_id = f.row_id"""  # noqa: S608 - names of this file
    with duckdb.connect() as db:
        ((lost, wrong, surplus),) = db.sql(counts).fetchall()
    return {"lost": lost, "wrong": wrong + surplus}


def rewrites(folder: Path, place: Path) -> list[Comparison]:
    """Rewrite a table of which 1 % changed, then one of which 1 % changed and all rows got a new time."""
    folder.mkdir()
    file = place / "stats.parquet"
    table = pq.read_table(file)
    comparisons = []
    with redis_server(folder) as client:
        redis = f"127.0.0.1:{client.connection_pool.connection_kwargs['port']}"
        feast = feast_project(folder / "feast", place, redis)
        project = Project(our_project(folder / "ours", place, redis, free_port()))
        apply(project)
        build(project, ["stats"])
        materialize(project, ["stats"])
        with contextlib.redirect_stdout(sys.stderr):
            feast.materialize(START, START + timedelta(hours=1), feature_views=["stats"])
        for hour, (case, restamp) in enumerate({"1 % changed": False, "1 % changed, all restamped": True}.items(), 1):
            table = changed(table, 0.01, 2 * hour, restamp=restamp)
            pq.write_table(table, file)
            build(project, ["stats"])
            began = time.perf_counter()
            done = materialize(project, ["stats"])["stats"]
            ours = time.perf_counter() - began
            began = time.perf_counter()
            with contextlib.redirect_stdout(sys.stderr):
                feast.materialize_incremental(START + timedelta(hours=2 * hour + 1), feature_views=["stats"])
            peer = time.perf_counter() - began
            note(f"{case}: {ours:.2f} s, Feast {peer:.2f} s, {done}")
            comparisons.append(less(f"rewrite, {case}", "s", ours, peer, "Feast, incremental"))
            comparisons.append(at_most(f"rewrite, {case}: rows written", "rows", done.written, int(len(table) * 0.01)))
    return comparisons


def upkeeps(place: Path, commits: int) -> list[Comparison]:
    """Commit to a table a hundred times a day with and without daily upkeep, and read it beside a fresh table."""
    root = our_project(place / "upkeep", place, "127.0.0.1:1", 0)
    view = Project(root).definitions.contract.views["stats"]
    chance, days, daily = np.random.default_rng(0), 365, 500
    kept, fresh = (OfflineStore(place / name) for name in ("kept", "fresh"))

    def rows(first: int, end: int, count: int) -> pa.Table:
        size = (end - first) * count
        event = np.repeat(np.arange(first, end), count) * DAY + np.tile(np.arange(count), end - first) * 1_000_000
        times = pa.array(event).cast(pa.timestamp("us", "UTC"))
        columns = {"user_id": np.tile(np.arange(count), end - first), "event_timestamp": times, "known_at": times}
        columns |= {f"f{n}": chance.standard_normal(size, dtype=np.float32) for n in range(20)}
        return pa.table(columns)

    def build(store: OfflineStore, built: pa.Table, within: Days | None = None) -> None:
        with store.prepare(view, built, within) as prepared:
            store.write(prepared)

    def push(day: int, second: int) -> None:
        pushed = rows(day, day + 1, 1)
        event = pa.array([day * DAY + (40_000 + second) * 1_000_000]).cast(pa.timestamp("us", "UTC"))
        for name in ("event_timestamp", "known_at"):
            pushed = pushed.set_column(pushed.schema.get_field_index(name), name, event)
        kept.extend(view, pushed.append_column(ACCEPTED, pa.array([0])).append_column(CONTRACT, pa.array([view.hash])))

    build(kept, rows(0, days, daily))
    at, longest = [time.time()], 0.0
    for n in range(1, commits + 1):
        today = days + (n - 1) // 100
        if n % 2:
            build(kept, rows(today, today + 1, daily * (n % 100 + 1) // 100), Days(today, today + 1))
        else:
            push(today - 1 - int(chance.integers(0, 30)), n)
        at.append(time.time())
        if n % 100 == 0:
            began = time.perf_counter()
            needed = range(0, kept.history(view).version, 500)
            # Ten days of a hundred commits each, in the time of this run.
            done = maintain(kept.stored(view.table), 1, needed, now=at[max(n - 1_000, 0)] + 86_400)
            longest = max(longest, time.perf_counter() - began)
            note(f"{n} commits: {done}, {time.perf_counter() - began:.2f} s")
    history = kept.history(view)
    build(fresh, history.table().drop_columns(["content_hash"]))
    wrong = 0 if fresh.history(view).fingerprint == history.fingerprint else history.rows()
    seconds = defaultdict(list)
    for _ in range(15):
        for store in (kept, fresh):
            began = time.perf_counter()
            store.history(view).table()
            seconds[store].append(time.perf_counter() - began)
    ours, peer = (statistics.median(seconds[store]) for store in (kept, fresh))
    case = f"upkeep, {commits:,} commits"
    cost, whole = (space(store.stored(view.table)) for store in (kept, fresh))
    return [
        less(f"{case}: read all rows", "s", ours, peer, "a fresh table", 1 / 1.2),
        at_most(f"{case}: rows that differ", "rows", wrong, 0),
        plain_figure(f"{case}: longest run", "s", round(longest, 2)),
        less(f"{case}: size with old versions", "MB", cost.bytes / 1e6, whole.bytes / 1e6, "a fresh table"),
    ]  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FileNotFoundError as error:
        sys.exit(f"benchmarks/offline.py needs redis-server on PATH ({error})")
