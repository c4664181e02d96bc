"""Damaged inputs, 80 of each kind: each is read, or refused with an error of ours. Any other exception is a failure.

A seed is the name of an input and a number, so a failure can be repeated: `damaged(content, "csv 17")`.
"""

import json
import os
import random
import shutil
import traceback
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from isthmus.features.errors import IsthmusError
from isthmus.features.redis.connection import connect
from isthmus.features.types import Int64, String
from isthmus.orchestration import settings
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import collect
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.package.inspect import inspect
from isthmus.package.snapshot.file import read_snapshot
from isthmus.serving.recorder.batch import HEAD, encoded
from isthmus.serving.recorder.spool import Spool, segments
from tests.distill.packages import of_tensors, resum
from tests.features.support import make_view
from tests.orchestration.recording.test_recorded import batch
from tests.orchestration.server.served import served
from tests.package.snapshot.support import made

COUNT = int(os.environ.get("TEST_DAMAGED", "80"))
TOKENS = (b"\x00", b"\xff\xfe", b"\n", b"\r", b'"', b",", b"nan", b"-1", b"1e999", b"9" * 40, b"{", b"]", "é".encode())

Attempt = Callable[[str], object]
pytestmark = [pytest.mark.accept, pytest.mark.thorough, pytest.mark.timeout(900)]


def damaged(content: bytes, seed: str) -> bytes:
    """Change one to three places of the content: flip, cut, repeat, overwrite or insert."""
    draw, data = random.Random(seed), bytearray(content)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(data) + 1)
        end = min(len(data), place + draw.choice((1, 2, 8, 64, 1024)))
        match draw.randrange(6):
            case 0 if place < len(data):
                data[place] ^= 1 << draw.randrange(8)
            case 1:
                del data[place:]
            case 2:
                del data[place:end]
            case 3:
                data[place:place] = data[place:end] * draw.choice((1, 7))
            case 4:
                data[place:end] = draw.randbytes(end - place)
            case _:
                data[place:place] = draw.choice(TOKENS)
    return bytes(data)


def all_read_or_refused(name: str, attempt: Attempt) -> None:
    """Try every seed of a name, and fail with the tracebacks of all that broke."""
    broken = {}
    refused = 0
    for number in range(COUNT):
        seed = f"{name} {number}"
        try:
            attempt(seed)
        except IsthmusError as error:
            refused += bool(str(error).strip())
        except Exception:  # noqa: BLE001 - the finding
            broken[seed] = traceback.format_exc(limit=-6)
    assert not broken, "\n".join(f"--- {seed}\n{text}" for seed, text in broken.items())
    assert refused, f"no damaged {name} was refused: is it read at all?"


DEFINITIONS = """
from datetime import timedelta

from pyspark.sql import DataFrame, functions as F

from isthmus import Entity, FeatureService, Field, Float64, Int64, Source, String, transform

orders = Source("orders", path="data/orders.{kind}", timestamp="at"{types})
customer = Entity("customer", join_keys={{"customer": String}})


@transform(entities=[customer], sources=[orders], ttl=timedelta(days=30), delay=timedelta(minutes=1),
           schema=[Field("paid", Float64), Field("items", Int64)])
def spending(orders: DataFrame) -> DataFrame:
    return orders.select("customer", "at", "paid", "items")


profile = FeatureService("profile", features=[spending])
"""
SETTINGS = """
engine = "sail"
[project]
name = "shop"
now = 2024-02-01T00:00:00Z
[stores]
online = "embedded"
[server]
port = 6570
[profiles.serving]
latency_objective_ms = 50
"""


def orders() -> pa.Table:
    times = [datetime(2024, 1, 1 + n // 4, n % 24, tzinfo=UTC) for n in range(100)]
    return pa.table(
        {
            "customer": [f"c{n % 17:03d}" for n in range(100)],
            "at": pa.array(times, pa.timestamp("us", tz="UTC")),
            "paid": [n / 7 for n in range(100)],
            "items": list(range(100)),
        }
    )


def project(folder: Path, kind: str) -> Path:
    (folder / "data").mkdir(parents=True)
    types = ', types={"paid": Float64, "items": Int64}' if kind == "csv" else ""
    (folder / "definitions.py").write_text(DEFINITIONS.format(kind=kind, types=types))
    (folder / "isthmus.toml").write_text(SETTINGS)
    file = folder / "data" / f"orders.{kind}"
    if kind == "csv":
        rows = orders().to_pylist()
        lines = [f'{row["customer"]},{row["at"].isoformat()},{row["paid"]!r},"{row["items"]}"\r\n' for row in rows]
        file.write_text("customer,at,paid,items\r\n" + "".join(lines))
    else:
        pq.write_table(orders(), file)
    apply(Project(folder))
    build(Project(folder))
    return folder


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_sources(kind: str, tmp_path: Path) -> None:
    folder = project(tmp_path / "shop", kind)
    file = folder / "data" / f"orders.{kind}"
    whole = file.read_bytes()

    table = DeltaTable(Project(folder).offline_store().path("spending"))

    def attempt(seed: str) -> None:
        table.update_incremental()
        before = table.version()
        file.write_bytes(damaged(whole, seed))
        try:
            build(Project(folder))
        except IsthmusError:
            table.update_incremental()
            assert table.version() == before, "a refused source changed the table"
            raise

    all_read_or_refused(kind, attempt)
    # Nothing that was refused left a trace: the whole file builds as before.
    file.write_bytes(whole)
    assert build(Project(folder))["spending"].rows == 100


def test_settings(tmp_path: Path) -> None:
    file = tmp_path / "isthmus.toml"

    def attempt(seed: str) -> None:
        file.write_bytes(damaged(SETTINGS.encode(), seed))
        settings.load(file)

    all_read_or_refused("toml", attempt)


def test_definitions(tmp_path: Path) -> None:
    folder = project(tmp_path / "shop", "parquet")
    file = folder / "definitions.py"
    whole = file.read_bytes()

    def attempt(seed: str) -> None:
        file.write_bytes(damaged(whole, seed))
        apply(Project(folder))

    all_read_or_refused("definitions", attempt)


def test_spools(tmp_path: Path) -> None:
    folder = project(tmp_path / "shop", "parquet")
    opened = Project(folder)

    def attempt(seed: str) -> None:
        spool = Spool(opened.spool, 1 << 30, "newest")
        whole = bytes(encoded(batch(spool.run, 1)))
        payload = damaged(whole[HEAD.size :], seed)
        head = HEAD.pack(*HEAD.unpack_from(whole)[:2], len(payload), zlib.crc32(payload))
        # Every other one has a right checksum over a wrong inside.
        spool.write(head + payload if random.Random(seed).random() < 0.5 else damaged(whole, seed))
        spool.close()
        good = Spool(opened.spool, 1 << 30, "newest")
        good.write(encoded(batch(good.run, 1)))
        good.close()
        found = collect(opened)
        assert found.answers >= 3, found
        assert not segments(opened.spool)
        if found.problems:
            raise IsthmusError(seed, "; ".join(found.problems))

    all_read_or_refused("spool", attempt)


def test_snapshots() -> None:
    views = [make_view({"a": Int64, "b": String}, {"k": Int64}, name="view")]
    rows = {(key,): (key, key, {"a": key, "b": "x" * key}) for key in range(40)}
    whole = made(views, [rows]).data

    def attempt(seed: str) -> None:
        read_snapshot(damaged(whole, seed), views, seed)

    all_read_or_refused("snapshot", attempt)


def test_packages(tmp_path: Path) -> None:
    whole = of_tensors(tmp_path / "whole")
    names = sorted(file.name for file in whole.iterdir())

    def attempt(seed: str) -> None:
        draw = random.Random(f"{seed} file")
        package = Path(shutil.copytree(whole, tmp_path / "package", dirs_exist_ok=False))
        try:
            file = package / draw.choice(names)
            file.write_bytes(damaged(file.read_bytes(), seed))
            if draw.random() < 0.7:
                try:
                    resum(package, models=draw.random() < 0.5)
                except (ValueError, TypeError, KeyError, AttributeError):
                    resum(package, models=False)
            inspect(package).require()
        finally:
            shutil.rmtree(package)

    all_read_or_refused("package", attempt)


def test_rows_in_redis(tmp_path: Path) -> None:
    folder = project(tmp_path / "shop", "parquet")
    opened = Project(folder)
    with ExitStack() as stack:
        url = stack.enter_context(opened.redis())
        materialize(opened)
        client = stack.enter_context(connect(url))
        http = stack.enter_context(served(opened))
        (key,) = [name for name in client.keys("*customer*") if b"c003" in name]
        ((field, whole),) = client.hgetall(key).items()
        body = {"feature_service": "profile", "entities": {"customer": ["c003", "c004"]}}
        right = http.post("/get-online-features", json=body)
        assert right.status_code == 200

        # A row of the right shape with another value in it is served: `isthmus verify` finds those.
        def attempt(seed: str) -> None:
            client.hset(key, field, damaged(whole, seed))
            answer = http.post("/get-online-features", json=body)
            found = answer.json()
            assert answer.status_code == 200, answer.text
            problems = found["metadata"].pop("problems", [])
            for wanted, got in zip(right.json()["results"], found["results"], strict=True):
                assert got["values"][1] == wanted["values"][1], "another key's row"
            if problems:
                raise IsthmusError(seed, json.dumps(problems))

        all_read_or_refused("row", attempt)
        client.hset(key, field, whole)
        assert http.post("/get-online-features", json=body).json()["results"] == right.json()["results"]
