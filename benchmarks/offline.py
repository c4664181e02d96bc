"""Compare the offline store with Feast: point-in-time joins, and Redis writes for a table that changed a little.

Each join runs in a fresh process; the cases alternate, and the median of the rounds is reported. All values of all
results are checked against a range join, the definition of the result. Joins run in two variants: with one time column,
as Polars and Feast's defaults support, and with `created` as the time from which a row may be used.

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
import pyarrow.parquet as pq
from offline_data import COLUMNS, changed, write_tables
from online import writes
from online_data import START, feast_project, our_project
from online_data import write_tables as write_online_tables
from processes import free_port, last_json, redis_server
from result import Comparison, at_most, less, note, options_parser, plain_figure, report

from isthmus.orchestration.apply.apply import apply
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
    parser.add_argument("--only", choices=["joins", "writes"])
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    rows, questions, users = (50_000, 5_000, 5_000) if options.quick else (1_000_000, 100_000, 100_000)
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        if options.only != "writes":
            write_tables(folder, rows, questions)
            for cutoff in (False, True):
                comparisons += joins(folder, rounds, questions, cutoff=cutoff)
        if options.only != "joins":
            write_online_tables(folder, {"stats": users, "wide": 10})
            comparisons += writes(folder / "writes", folder, users, rounds)
            comparisons += rewrites(folder / "rewrites", folder)
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


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FileNotFoundError as error:
        sys.exit(f"benchmarks/offline.py needs redis-server on PATH ({error})")
