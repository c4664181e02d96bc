"""Measure the cost of recording answers for lookups, and the time to replay them.

Two servers use the same Redis; one records. wrk loads them alternately in many short pairs, so that other load on the
machine affects both; the result is the median of the pairs' ratios. Both servers are restarted several times, because
one process of the same server may be 5 % faster for its whole life. Then the answers are collected, and 100,000 of them
replayed.

Needs `redis-server` and `wrk`. Run it on an idle machine.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as ds
from online import Case, body, load
from online_data import our_project, write_tables
from processes import answers, family, free_port, redis_server, resident_mb, settle, started, wait
from result import Comparison, at_least, at_most, note, options_parser, report

from isthmus.features import clock
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import collect
from isthmus.orchestration.recording.replay import replay
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize

CASES = [Case("stats", 1, 0), Case("stats", 100, 0)]
RATE, P99 = 0.95, 1.10
"""Targets: requests per second and p99, relative to the same server without recording."""
METRICS = ("requests_per_s", "p99_ms", "processor_us")
ANSWERS, SECONDS = 100_000, 60.0


def main() -> int:
    parser = options_parser(__doc__, "few short rounds")
    parser.add_argument("--servers", type=int, default=8, help="how often both servers are started")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of loads of the same servers")
    parser.add_argument("--seconds", type=int, default=2, help="length of each load")
    options = parser.parse_args()
    if options.quick:
        options.servers, options.rounds, options.seconds = 2, 2, 2
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        comparisons = measured(Path(name), options.servers, options.rounds, options.seconds)
    return report("recording", comparisons, as_json=options.json, quick=options.quick)


def measured(folder: Path, servers: int, rounds: int, seconds: int) -> list[Comparison]:
    tables = write_tables(folder, {"stats": 100_000, "wide": 1})
    keys = len(tables["stats"])
    with redis_server(folder) as client:
        redis = f"127.0.0.1:{client.connection_pool.connection_kwargs['port']}"
        project = Project(our_project(folder / "ours", folder, redis, free_port()))
        apply(project)
        build(project)
        materialize(project)
        ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
        resident: dict[bool, list[float]] = defaultdict(list)
        for number in range(servers):
            with contextlib.ExitStack() as stack:
                # Alternate which server starts first, and which is loaded first.
                pair = {on: stack.enter_context(server(project, on)) for on in (bool(number % 2), not number % 2)}
                for case in CASES:
                    for url, _ in pair.values():
                        load(url, case, keys, 1)  # to warm up
                for turn in range(rounds):
                    for case in CASES:
                        figures = {}
                        for on in (False, True) if turn % 2 else (True, False):
                            figures[on] = load_server(*pair[on], case, keys, seconds)
                        note(f"{case.name}: {figures}")
                        for metric in METRICS:
                            ratios[case.name, metric].append(figures[True][metric] / figures[False][metric])
                for on, (_, process) in pair.items():
                    resident[on].append(resident_mb(process, "isthmus.serving"))
    note(f"resident memory: {dict(resident)}")
    comparisons = []
    for case in CASES:
        for metric in METRICS:
            low, middle, high = statistics.quantiles(ratios[case.name, metric], n=4)
            note(f"{case.name}, {metric}: {middle:.3f}, half of the pairs between {low:.3f} and {high:.3f}")
        rate, p99, processor = (statistics.median(ratios[case.name, metric]) for metric in METRICS)
        comparisons.append(
            at_least(f"lookups, {case.name}: recording against not", "of the rate", round(rate, 3), RATE)
        )
        comparisons.append(at_most(f"lookups, {case.name}: recording against not", "of the p99", round(p99, 3), P99))
        # Processor time is affected least by other load.
        comparisons.append(at_most(f"lookups, {case.name}: recording against not", "of the processor time",
                                   round(processor, 3), 1 / RATE))  # fmt: skip
    more = statistics.median(resident[True]) - statistics.median(resident[False])
    return [*comparisons, at_most("additional resident memory", "MB", round(more, 1), 40.0), *replay_answers(project)]


@contextlib.contextmanager
def server(project: Project, recording: bool) -> "Iterator[tuple[str, subprocess.Popen[bytes]]]":
    port, log = free_port(), project.root.parent / f"server{recording}.log"
    isthmus = str(Path(sys.executable).with_name("isthmus"))
    command = [isthmus, "serve", "--project", str(project.root), "--port", str(port)]
    with started(command, log, {"ISTHMUS_SERVER__RECORD": "{}"} if recording else {}) as process:
        url = f"http://127.0.0.1:{port}/get-online-features"
        wait(lambda: answers(url, body("stats", 1)), process, log)
        yield url, process


def load_server(url: str, process: "subprocess.Popen[bytes]", case: Case, keys: int, seconds: int) -> dict[str, float]:
    """Load a server and return wrk's figures with the processor time per answer."""
    before = processor_seconds(process)
    figures = load(url, case, keys, seconds)
    settle(process)
    spent = processor_seconds(process) - before
    return {**figures, "processor_us": round(spent / figures["requests"] * 1e6, 1)}


def processor_seconds(process: "subprocess.Popen[bytes]") -> float:
    # schedstat has nanoseconds; the CPU times of a process are too coarse, in hundredths of a second.
    files = (file for member in family(process.pid) for file in Path(f"/proc/{member.pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def replay_answers(project: Project) -> list[Comparison]:
    """Replay the answers of one key and count differences."""
    began = time.perf_counter()
    counts = collect(project)
    taken = time.perf_counter() - began
    note(f"{counts} in {taken:.1f} s")
    moments = RecordedAnswers(project.offline).read(ds.field("rows") == 1, ["run", "sequence", "at"])["at"]
    at = pc.sort_indices(moments)
    last = moments[at[min(ANSWERS, len(moments) - 1)].as_py()].as_py()
    began = time.perf_counter()
    outcome = replay(project, first=clock.moment(0), end=last)
    seconds = time.perf_counter() - began
    note(f"{outcome} in {seconds:.1f} s")
    return [
        at_least("collected from the spool", "answers/s", round(counts.answers / taken), 1.0),
        at_most(f"replay of {ANSWERS:,} answers", "s", round(seconds * ANSWERS / outcome.answers, 1), SECONDS),
        at_most("differing answers", "", outcome.answers - outcome.same, 0),
    ]


if __name__ == "__main__":
    sys.exit(main())
