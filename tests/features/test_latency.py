"""What servers say of their latency, against the durations that they counted."""

import math
import os
from bisect import bisect_left
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features import latency
from isthmus.features.latency import (
    STALE_SECONDS,
    WINDOW_SECONDS,
    LatencyReader,
    LatencySample,
    LatencyWriter,
    quantile,
)

BOUNDS = (0.001, 0.0025, 0.005, 0.01)
DURATIONS = st.lists(st.floats(0, 0.05) | st.sampled_from([0.005, 0.0050001]), max_size=120)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(latency, "time", found)
    return found


class Server:
    """One that counts durations."""

    def __init__(self, folder: Path, objective_ms: float = 5.0) -> None:
        self.teller, self.counts = LatencyWriter(folder, objective_ms, BOUNDS), [0] * (len(BOUNDS) + 1)

    def answer(self, durations: list[float]) -> None:
        for seconds in durations:
            self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.teller.write(self.counts)


@given(ticks=st.lists(st.tuples(DURATIONS, DURATIONS), min_size=1, max_size=12))
def test_what_is_heard_is_what_was_answered_of_late(ticks: list[tuple[list[float], list[float]]]) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        clock = Clock()
        patch.setattr(latency, "time", clock)
        servers, heard = [Server(Path(folder)) for _ in range(2)], LatencyReader(Path(folder))
        for number, tick in enumerate(ticks):
            for server, durations in zip(servers, tick, strict=True):
                server.answer(durations)
            found = heard()
            # The naive one: all durations of the ticks since the one that is a window back.
            first = max(1, number - int(WINDOW_SECONDS) + 1)
            late = sorted(seconds for pair in ticks[first : number + 1] for one in pair for seconds in one)
            assert found is not None
            assert (found.answered, found.objective_ms) == (len(late), 5.0)
            assert found.slow == sum(seconds > 0.005 for seconds in late)
            if late:
                exact = late[math.ceil(0.99 * len(late)) - 1] * 1000
                bounds = (0.0, *(1000 * bound for bound in BOUNDS), math.inf)
                place = max(1, bisect_left(bounds, exact))
                assert bounds[place - 1] <= found.p99_ms <= bounds[place]
                assert found.strained == (exact > 5 and found.slow >= 3)
            clock.now += 1


def test_a_quantile_is_prometheus_own() -> None:
    # histogram_quantile(0.99) of 100 in (0.001, 0.0025]: rank 99 of 100.
    assert quantile({0.001: 0, 0.0025: 100, math.inf: 0}, 0.99) == pytest.approx(0.001 + 0.0015 * 0.99)
    assert quantile({0.001: 0, 0.0025: 10, math.inf: 90}, 0.99) == 0.0025
    assert quantile({}, 0.99) == 0


def test_a_server_that_is_down_hangs_or_is_elsewhere_says_nothing(tmp_path: Path, clock: Clock) -> None:
    heard = LatencyReader(tmp_path / "latency")
    assert heard() is None
    hanging, killed, server = (Server(tmp_path / "latency") for _ in range(3))
    for one in (hanging, killed, server):
        one.answer([0.02] * 10)
    assert heard() is not None
    clock.now += STALE_SECONDS
    server.answer([0.02] * 4)
    found = heard()
    assert found is not None
    assert found.slow == 4
    server.teller.close()
    assert heard() is None
    # After a restart of the machine its clock begins anew.
    clock.now = 3.0
    assert heard() is None
    # Files of those that were killed are cleared up by the next one.
    Server(tmp_path / "latency").answer([])
    assert len(list((tmp_path / "latency").iterdir())) == 1
    (file,) = (tmp_path / "latency").iterdir()
    told = msgspec.json.decode(file.read_bytes(), type=LatencySample)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(told, machine="another")))
    assert heard() is None


def test_a_new_server_deletes_no_file_of_a_living_one(tmp_path: Path, clock: Clock) -> None:
    """Also of another machine, whose clock is another. What nobody has written for long is deleted."""
    living, killed, broken, started = (tmp_path / f"{name}.json" for name in ("living", "killed", "broken", "started"))
    for file in (living, killed):
        sample = LatencySample("another", clock.now + 1e6, 5.0, BOUNDS, (0,) * (len(BOUNDS) + 1))
        file.write_bytes(msgspec.json.encode(sample))
    broken.write_bytes(b"")
    partial = started.with_suffix(".json.partial")
    partial.write_bytes(b"")
    for file in (killed, broken, partial):
        os.utime(file, (0, 0))
    (tmp_path / "a folder.json").mkdir()
    os.utime(tmp_path / "a folder.json", (0, 0))
    server = Server(tmp_path)
    server.answer([])
    names = {file.name for file in tmp_path.iterdir()}
    assert {"living.json", "a folder.json"} < names
    assert len(names) == 3


def test_what_cannot_be_read_says_nothing(tmp_path: Path, clock: Clock) -> None:
    server, heard = Server(tmp_path), LatencyReader(tmp_path)
    server.answer([0.02] * 5)
    (file,) = tmp_path.iterdir()
    for content in (b"", b"{}", b"\xff", file.read_bytes()[:-5]):
        file.write_bytes(content)
        assert heard() is None
    (tmp_path / "a folder.json").mkdir()
    server.answer([0.02] * 5)
    clock.now += 1
    heard()
    server.answer([0.02] * 5)
    assert heard() is not None


def test_few_slow_answers_are_no_strain(tmp_path: Path, clock: Clock) -> None:
    server, heard = Server(tmp_path), LatencyReader(tmp_path)
    seen = []
    for slow, fast in ((0, 0), (2, 0), (1, 0), (0, 297), (0, 1)):
        server.answer([0.02] * slow + [0.001] * fast)
        seen.append(heard())
        clock.now += 0.1
    assert [one is not None and one.strained for one in seen] == [False, False, True, False, False]
    assert str(seen[2]) == "p99 10 ms > 5 ms"


def test_the_name_of_a_file_does_not_follow_from_the_process(tmp_path: Path) -> None:
    # Process ids of two containers may be alike.
    servers = [Server(tmp_path) for _ in range(2)]
    for server in servers:
        server.answer([])
    assert len(list(tmp_path.iterdir())) == 2
    assert not any(str(os.getpid()) == file.stem for file in tmp_path.iterdir())
