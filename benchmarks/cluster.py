"""Compare a project on a cluster with the same project in one process: memory, bytes, seconds, and equal results.

The flights, ten times over with other keys, on a Spark standalone cluster of two workers with one core each that do not
see the project's folder. Tables and training set are in S3 (SeaweedFS), and online rows in a Redis Cluster of three
primaries, on both sides; all on this machine. One process means Sail. Each step runs in its own process. Its memory is
the peak of that process and its children. "From the engine" is what it received over its connections to the cluster,
with all that is not a row. The figures in seconds depend on the machine, which runs everything: they have no target.
"""

import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from offline_jobs import peak_mb
from processes import last_json
from result import at_most, less, note, options_parser, plain_figure, report
from scaling import DEFINITIONS, write

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.objectstore import ACCESS, SECRET, object_store
from tests.servers import redis_cluster
from tests.transforms.cluster import standalone

STEPS = ["build", "training set", "materialize", "materialize again"]
MOST_MB, MOST_ROWS_MB = 400, 1
SETTINGS = """\
engine = "{engine}"

[project]
name = "cluster"
now = 2014-01-02T00:00:00Z

[stores]
online = "redis+cluster://127.0.0.1:{redis}"
offline = "s3://shop/cluster"

[stores.storage_options]
AWS_ENDPOINT_URL = "{s3}"
AWS_ALLOW_HTTP = "true"
AWS_REGION = "us-east-1"
"""
KEYS = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}


def main() -> int:
    parser = options_parser(__doc__, "the flights once")
    parser.add_argument("--step", nargs=2, help="run a step in this process")
    options = parser.parse_args()
    if options.step:
        sys.stdout.write(json.dumps(run(options.step[0], Path(options.step[1]))) + "\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="cluster-") as name:
        folder = Path(name)
        rows = write(folder / "flights.parquet", 1 if options.quick else 10)
        (folder / "cluster").mkdir()
        with standalone(folder / "spark", [folder / "cluster"], KEYS) as url:
            spread = side(folder / "cluster", url)
        alone = side(folder / "alone", "sail")
    if alone["digests"] != spread["digests"]:
        raise SystemExit(f"the results differ: {alone['digests']}, {spread['digests']}")
    found = []
    for step in STEPS:
        case, one, many = f"{step}, {rows:,} flights", alone[step], spread[step]
        found += [
            at_most(case, "peak memory (MB)", many["mb"], MOST_MB),
            less(case, "peak memory (MB)", many["mb"], one["mb"], "one process"),
            at_most(case, "from the engine (MB)", many["engine_mb"], MOST_ROWS_MB),
            plain_figure(case, "from the store, Redis and engine (MB)", many["all_mb"]),
            less(case, "seconds", many["seconds"], one["seconds"], "one process"),
        ]
    return report("cluster", found, as_json=options.json, quick=options.quick)


def side(folder: Path, engine: str) -> dict[str, Any]:
    """Run all steps on an engine, with an object store and a Redis Cluster of their own."""
    folder.mkdir(exist_ok=True)
    with object_store(folder.with_name(f"{folder.name}-s3")) as storage, redis_cluster(folder / "redis") as ports:
        settings = SETTINGS.format(engine=engine, redis=ports[0], s3=storage.endpoint)
        (folder / "isthmus.toml").write_text(settings)
        source = f'path="{folder.parent / "flights.parquet"}"'
        (folder / "definitions.py").write_text(DEFINITIONS.replace('path="flights.parquet"', source))
        measured = {}
        for step in [*STEPS, "digests"]:
            measured[step] = last_json([sys.executable, __file__, "--step", step, str(folder)], KEYS)
            note(f"{engine}, {step}: {measured[step]}")
    return measured


def run(step: str, folder: Path) -> dict[str, Any]:
    from isthmus.orchestration.apply.apply import apply
    from isthmus.orchestration.project import Project
    from isthmus.orchestration.tables.build import build
    from isthmus.orchestration.tables.materialize import materialize
    from isthmus.orchestration.training.set import training_set

    project = Project(folder)
    join = "engine" if project.cluster else "embedded"
    steps: dict[str, Callable[[], object]] = {
        "build": lambda: build(project),
        "training set": lambda: training_set(project, join=join),
    }
    with contextlib.redirect_stdout(sys.stderr):
        if step == "digests":
            return digests(project)
        if step == "build":
            apply(project)
        with received() as ports:
            began = time.perf_counter()
            steps.get(step, lambda: materialize(project))()
            seconds = time.perf_counter() - began
    engine = project.settings.engine.rpartition(":")[2]
    figures = {
        "seconds": seconds, "mb": peak_mb(), "all_mb": sum(ports.values()) / 1e6,
        "engine_mb": ports.get(int(engine) if engine.isdigit() else -1, 0) / 1e6,
    }  # fmt: skip
    return {name: round(figure, 3) for name, figure in figures.items()}


def digests(project: Any) -> dict[str, str]:
    """Hash the table, the training set, and every row in Redis."""
    from isthmus.features.online.store import OnlineStore
    from isthmus.features.redis.connection import connect
    from isthmus.orchestration.artifacts import TrainingSet

    contract = project.applied()
    (latest,) = (project.state / "training").glob("*/latest")
    made = TrainingSet.read(latest.with_name(latest.read_text()))
    table, rows = made.table(), pa.BufferOutputStream()
    plain = {
        field.name: table[field.name].cast(field.type.value_type if pa.types.is_dictionary(field.type) else field.type)
        for field in table.schema
    }
    pq.write_table(pa.table(plain), rows)
    stored = hashlib.sha256()
    with project.redis() as url, connect(url) as client:
        store = OnlineStore(client, contract)
        for view in contract.views.values():
            for name in sorted(name for names in store.names(view) for name in names):
                stored.update(repr((name, sorted(client.hgetall(name).items()))).encode())
    tables = [project.offline_store().history(view).fingerprint for view in contract.views.values()]
    return {
        "tables": ",".join(tables),
        "id": made.id,
        "rows": hashlib.sha256(rows.getvalue()).hexdigest(),
        "redis": stored.hexdigest(),
    }


@contextlib.contextmanager
def received() -> Iterator[dict[int, int]]:
    """Count the bytes that this process receives over TCP in the block, by the port of the other end."""
    counts: dict[tuple[int, int], int] = {}
    totals: dict[int, int] = {}
    end = threading.Event()

    def watch() -> None:
        while not end.wait(0.02):
            for file in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError):
                    if not str(file.readlink()).startswith("socket:"):
                        continue
                    with socket.socket(fileno=os.dup(int(file.name))) as each:
                        if each.family not in (socket.AF_INET, socket.AF_INET6):
                            continue
                        # Linux's struct tcp_info has tcpi_bytes_received at byte 128.
                        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                        place = (each.getsockname()[1], each.getpeername()[1])
                        counts[place] = max(counts.get(place, 0), struct.unpack_from("<Q", info, 128)[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield totals
    finally:
        end.set()
        thread.join()
        for (_, port), count in counts.items():
            totals[port] = totals.get(port, 0) + count


if __name__ == "__main__":
    sys.exit(main())
