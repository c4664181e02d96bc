"""Compare the online store with Feast: lookups over HTTP and writes into Redis, on one machine in one run.

Both servers use the same Redis, hold the same values, speak the same JSON and get the same keys from the same wrk
script. The cases alternate, and the median of the rounds is reported. Feast runs with its best settings. A pipeline of
raw HMGETs, sent from Python without decoding the replies, shows the upper limit.

Needs `redis-server` and `wrk`. Run it on an idle machine.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
from online_data import START, VIEWS, feast_project, our_project, write_tables
from processes import answers, free_port, last_json, redis_server, resident_mb, settle, started, wait
from result import Comparison, at_most, less, more, note, options_parser, report

from isthmus.features.online.plan import LookupPlan
from isthmus.features.redis.pipeline import ask
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize

SCRIPT = Path(__file__).with_name("lookup.lua")
FEAST, OURS = "Feast, best settings", "Isthmus"
CONNECTIONS = 8
READY_SECONDS, RESIDENT_MB, WRITE_BAR = 1.2, 150.0, 10.0


@dataclass(frozen=True)
class Case:
    """A request shape, and the target ratio to Feast's rate."""

    view: str
    keys: int
    bar: float

    @property
    def name(self) -> str:
        return f"{self.keys} key{'s' if self.keys > 1 else ''} x {VIEWS[self.view]} features"


CASES = [
    Case("stats", 1, 5), Case("stats", 10, 10), Case("stats", 100, 25), Case("stats", 500, 40),
    Case("wide", 1, 15), Case("wide", 100, 40),
]  # fmt: skip


def main() -> int:
    parser = options_parser(__doc__, "one short round over small tables")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=8, help="seconds of each load")
    parser.add_argument("--only", choices=["lookups", "writes"])
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 2
    rows = {"stats": 10_000, "wide": 1_000} if options.quick else {"stats": 100_000, "wide": 10_000}
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        tables = write_tables(folder, rows)
        if options.only != "writes":
            comparisons += lookups(folder / "lookups", folder, tables, options.rounds, options.seconds)
        if options.only != "lookups":
            comparisons += writes(folder / "writes", folder, rows["stats"], options.rounds)
    return report("online", comparisons, as_json=options.json, quick=options.quick)


def lookups(folder: Path, place: Path, tables: dict[str, pa.Table], rounds: int, seconds: int) -> list[Comparison]:
    """Load both servers alternately and compare them."""
    folder.mkdir()
    figures: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    with redis_server(folder) as client, contextlib.ExitStack() as stack:
        redis = f"127.0.0.1:{client.connection_pool.connection_kwargs['port']}"
        note("filling Redis for Feast")
        store = feast_project(folder / "feast", place, redis)
        with contextlib.redirect_stdout(sys.stderr):
            store.materialize(START, START + timedelta(hours=2))
        note("filling Redis for Isthmus")
        project = Project(our_project(folder / "ours", place, redis, free_port()))
        apply(project)
        build(project)
        materialize(project)
        servers, ready = {}, 0.0
        for name, (command, port) in {
            FEAST: feast_server(folder / "feast"), OURS: our_server(project)
        }.items():  # fmt: skip
            log = folder / f"{name.split(',')[0]}.log"
            began = time.perf_counter()
            process = stack.enter_context(started(command, log, {"HOME": str(folder)}))
            url = f"http://127.0.0.1:{port}/get-online-features"
            wait(lambda url=url: answers(url, body("stats", 1)), process, log)  # type: ignore[misc]
            ready = time.perf_counter() - began
            servers[name] = url, process
        same_answers({name: url for name, (url, _) in servers.items()}, tables)
        for _ in range(rounds):
            for case in CASES:
                for name, (url, process) in servers.items():
                    for length in (min(2, seconds), seconds):  # the first run is a warm-up
                        figure = load(url, case, len(tables[case.view]), length)
                        settle(process)
                    note(f"{case.name}, {name}: {figure}")
                    figures[case.name, name].append(figure)
                figures[case.name, "raw"].append({"requests_per_s": raw(client, project, case, min(2, seconds))})
        resident = resident_mb(servers[OURS][1], "isthmus.serving")
    comparisons = []
    for case in CASES:
        ours, peer, limit = (middle(figures[case.name, name]) for name in (OURS, FEAST, "raw"))
        if not peer["requests_per_s"]:
            raise SystemExit(f"{FEAST}: no request of {case.name} was answered in time; increase --rounds or --seconds")
        comparisons.append(more(f"lookup, {case.name}", "requests/s", ours["requests_per_s"], peer["requests_per_s"],
                                FEAST, case.bar))  # fmt: skip
        comparisons.append(more(f"lookup, {case.name}: the limit", "requests/s", ours["requests_per_s"],
                          limit["requests_per_s"], "raw HMGET pipeline, one connection"))  # fmt: skip
        comparisons.append(less(f"lookup, {case.name}: our p99, their p50", "ms", ours["p99_ms"], peer["p50_ms"], FEAST,
                          1.0 if case.keys >= 10 else None))  # fmt: skip
    return [*comparisons, at_most("ready", "s", round(ready, 2), READY_SECONDS),
            at_most("resident memory of the worker", "MB", round(resident, 1), RESIDENT_MB)]  # fmt: skip


def feast_server(folder: Path) -> tuple[list[str], int]:
    """Return the command of Feast's server with its fastest options: no restarts, no access log."""
    port = free_port()
    feast = [sys.executable, "-m", "feast.cli.cli", "--chdir", str(folder), "serve", "--port", str(port)]
    return [*feast, "--workers", "1", "--max-requests", "0", "--no-access-log"], port


def our_server(project: Project) -> tuple[list[str], int]:
    isthmus = str(Path(sys.executable).with_name("isthmus"))
    return [isthmus, "serve", "--project", str(project.root)], project.settings.server.port


def body(view: str, keys: int) -> dict[str, Any]:
    return {"features": [f"{view}:f{n}" for n in range(VIEWS[view])], "entities": {"user_id": list(range(keys))}}


def same_answers(servers: dict[str, str], tables: dict[str, pa.Table]) -> None:
    """Raise a RuntimeError if a server does not return the values of the tables, in order."""
    for name, url in servers.items():
        for view, table in tables.items():
            keys = [5, *range(50), 5, 3]
            request = {**body(view, 1), "entities": {"user_id": keys}}
            answer = httpx.post(url, json=request, timeout=60).json()
            columns = dict(zip(answer["metadata"]["feature_names"], answer["results"], strict=True))
            for n in range(VIEWS[view]):
                expected = table[f"f{n}"].take(keys).to_numpy()
                found = np.array(columns[f"f{n}"]["values"], np.float32)
                if not np.array_equal(found, expected):
                    raise RuntimeError(f"{name} returns {found[:3]} for {view}:f{n} instead of {expected[:3]}")


def load(url: str, case: Case, key_space: int, seconds: int) -> dict[str, float]:
    settings = {
        "LOOKUP_FEATURES": ",".join(f"{case.view}:f{n}" for n in range(VIEWS[case.view])),
        "LOOKUP_KEYS": str(case.keys),
        "LOOKUP_KEY_SPACE": str(key_space),
    }
    options = ["-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--timeout", "60s", "-s", str(SCRIPT), url]
    figure = last_json(["wrk", *options], settings)
    if figure["non2xx"] or figure["socket_errors"]:
        raise RuntimeError(f"{url} failed under load: {figure}")
    return figure


def raw(client: Any, project: Project, case: Case, seconds: float) -> float:
    """Return pipelines of HMGET per second on one connection, without decoding replies."""
    plan = LookupPlan(project.applied(), [case.view])
    chance = np.random.default_rng(0)
    pipelines = [plan.commands({"user_id": chance.integers(0, 1_000, case.keys).tolist()}) for _ in range(50)]
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        ask(client, pipelines[done % len(pipelines)])
        done += 1
    return done / (time.perf_counter() - began)


def writes(folder: Path, place: Path, rows: int, rounds: int) -> list[Comparison]:
    """Write a view of twenty features into an empty Redis, alternately with Feast and Isthmus, in this process."""
    folder.mkdir()
    seconds: dict[str, list[float]] = defaultdict(list)
    with redis_server(folder) as client:
        redis = f"127.0.0.1:{client.connection_pool.connection_kwargs['port']}"
        stores = {
            "Feast": feast_project(folder / "feast", place, redis),
            "Feast, its options for fast writes": feast_project(folder / "fast", place, redis, best_writes=True),
        }
        project = Project(our_project(folder / "ours", place, redis, free_port()))
        apply(project)
        build(project, ["stats"])
        for _ in range(rounds):
            for name, store in stores.items():
                client.flushall()
                began = time.perf_counter()
                with contextlib.redirect_stdout(sys.stderr):
                    store.materialize(START, START + timedelta(hours=2), feature_views=["stats"])
                seconds[name].append(time.perf_counter() - began)
            client.flushall()
            began = time.perf_counter()
            written = materialize(project, ["stats"])["stats"].written
            seconds[OURS].append(time.perf_counter() - began)
            if written != rows:
                raise RuntimeError(f"{written} rows were written instead of {rows}")
            note(f"writes: { {name: round(times[-1], 2) for name, times in seconds.items()} }")
    rates = {name: rows / statistics.median(times) for name, times in seconds.items()}
    best = max(stores, key=lambda name: rates[name])
    return [more(f"write, {rows:,} rows x 20 features", "rows/s", rates[OURS], rates[best], best, WRITE_BAR)]


def middle(figures: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median([figure[name] for figure in figures]) for name in figures[0]}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        sys.exit(f"benchmarks/online.py needs redis-server and wrk on PATH ({error})")
