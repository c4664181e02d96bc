"""Measure how many pushed rows per second a collection moves from Redis to a Delta table.

A server accepts pushes of a view with twenty features, as JSON over HTTP. Then a collection moves them to the history:
to a day without rows, and to a day with a million rows. Pushes with history are compared with pushes to the online
store alone. Finally the rows in the table are counted.

Needs `redis-server`. Run it on an idle machine.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from result import Comparison, at_least, less, options_parser, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.serving.support import CARRIER, NOW, PUNCTUALITY, Server, contract_of, serving, view, wait

from isthmus.features.offline.canonical import declared_schema
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.pushes import stream
from isthmus.features.publishing.collect import collect
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.types import Float32, Int64

FEATURES = 20
VIEW = view("wide", [CARRIER], [(f"f{n}", Float32 if n % 2 else Int64) for n in range(FEATURES)])
CONTRACT = contract_of(PUNCTUALITY, VIEW)
ROWS = 2_000
"""Rows per push."""
BAR = 20_000


def body(turn: int, to: str) -> dict[str, Any]:
    numbers = list(range(turn * ROWS, (turn + 1) * ROWS))
    columns = {field.name: numbers if field.dtype is Int64 else [n / 7 for n in numbers] for field in VIEW.fields}
    times = {"event_timestamp": [NOW - turn] * ROWS}
    return {"push_source_name": "wide", "to": to, "df": {"carrier": [f"c{n}" for n in numbers], **times, **columns}}


def push(server: Server, turns: range, to: str) -> float:
    bodies = [body(turn, to) for turn in turns]
    began = time.perf_counter()
    for each in bodies:
        server.http.post("/push", json=each).raise_for_status()
    return len(turns) * ROWS / (time.perf_counter() - began)


def fill_table(store: OfflineStore, rows: int) -> None:
    """Write `rows` rows to the table, on the day of the pushes."""
    event = pa.array(np.full(rows, NOW - 10**9) + np.arange(rows)).cast(pa.timestamp("us", tz="UTC"))
    values = {field.name: pa.array(np.arange(rows)) for field in VIEW.fields}
    columns = {"carrier": pa.array([f"b{n % 1000}" for n in range(rows)]), "event_timestamp": event, "known_at": event}
    table = pa.table({**columns, **values}).cast(declared_schema(VIEW))
    with store.prepare(VIEW, table) as ready:
        store.write(ready)


def collection(url: str, store: OfflineStore, rows: int) -> float:
    before = store.commit(VIEW)
    began = time.perf_counter()
    with connect(url) as client:
        counts = collect(client, CONTRACT.project, store, VIEW.table, [VIEW])
        taken = time.perf_counter() - began
        client.delete(stream(CONTRACT.project, VIEW.table))
    after = store.commit(VIEW)
    if before is None or after is None or {counts.rows, counts.added, after.rows - before.rows} != {rows}:
        raise RuntimeError(f"{rows:,} rows were pushed, but the history has {counts}")
    return rows / taken


def measured(folder: Path, turns: int, stored: int) -> list[Comparison]:
    (folder / "server").mkdir()
    (folder / "server" / "contract.json").write_bytes(CONTRACT.dumps())
    with EmbeddedRedis(folder / "redis") as redis, serving(folder / "server", redis.url) as server:
        wait(lambda: server.http.get("/readyz").status_code == 200, "the contract")
        push(server, range(1), "online")
        comparisons = []
        alone = push(server, range(turns), "online")
        for case, rows in (("an empty day", 0), (f"a day of {stored:,} rows", stored)):
            store = OfflineStore(folder / f"store{rows}")
            fill_table(store, rows)
            both = push(server, range(turns), "online_and_offline")
            comparisons.append(at_least(f"from Redis to the history, {case}", "rows/s",
                                  collection(redis.url, store, turns * ROWS), BAR))  # fmt: skip
        took, instead = ROWS / both * 1000, ROWS / alone * 1000
        comparisons.append(
            less(f"push of {ROWS:,} rows with the history", "ms", took, instead, "for the online store alone")
        )
    return comparisons


def main() -> int:
    options = options_parser(__doc__, "few rows").parse_args()
    turns, stored = (25, 100_000) if options.quick else (150, 1_000_000)
    with TemporaryDirectory() as folder:
        comparisons = measured(Path(folder), turns, stored)
    return report("pushes", comparisons, as_json=options.json, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
