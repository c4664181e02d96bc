"""Giving way: the policy, that no weight changes, pauses that can be stopped and killed, and what is told of them."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from isthmus.distill.accelerator import threads
from isthmus.distill.throttle import policy as courtesy
from isthmus.distill.throttle.policy import (
    LONGEST_SECONDS,
    SETTLE_SECONDS,
    SHORTEST_SECONDS,
    Policy,
    Throttle,
    throttled,
)
from isthmus.distill.throttle.priority import Priority
from isthmus.distill.training import loop
from isthmus.distill.training.checkpoint import copy_weights
from isthmus.distill.training.loop import Training
from isthmus.features.errors import Stopped
from tests.distill.pausing import STEPS, STRAINED, Clock, Spent, hearing, squares, training

LOOKS = st.lists(st.tuples(st.booleans(), st.floats(0.1, 20)), max_size=200)
DEEPEST = st.integers(1, 8)


# --- the policy


def followed(looks: list[tuple[bool, float]], deepest: int) -> list[tuple[float, bool, Policy]]:
    """Time, strain and courtesy after each look, the seconds since the one before it given."""
    now, found = 0.0, [(0.0, False, Policy())]
    for strained, since in looks:
        now += since
        found.append((now, strained, found[-1][2].next(strained, now, deepest)))
    return found


@given(looks=LOOKS, deepest=DEEPEST)
def test_a_degree_at_a_time_deeper_under_strain_alone_and_back_in_calm_alone(
    looks: list[tuple[bool, float]], deepest: int
) -> None:
    deepened, changed = -SETTLE_SECONDS, 0.0
    for (_, _, before), (now, strained, after) in pairwise(followed(looks, deepest)):
        step = after.degree - before.degree
        assert 0 <= after.degree <= deepest
        assert step in ((0, 1) if strained else (0, -1))
        assert SHORTEST_SECONDS <= after.hold <= LONGEST_SECONDS
        if step:
            # What was changed has had its time to show; what was taken back too early is given at once.
            assert step > 0 or now - changed >= SHORTEST_SECONDS
            assert step < 0 or before.recovering or now - deepened >= SETTLE_SECONDS
            deepened, changed = now if step > 0 else deepened, now
        # The lowest priority stays.
        assert after.degree >= min(before.degree, 1)


@given(looks=LOOKS, deepest=DEEPEST)
def test_no_degree_is_taken_back_before_the_objective_was_kept_for_long_enough(
    looks: list[tuple[bool, float]], deepest: int
) -> None:
    strained_at = 0.0
    for (_, _, before), (now, strained, after) in pairwise(followed(looks, deepest)):
        if after.degree < before.degree:
            assert now - strained_at >= before.hold
        strained_at = now if strained else strained_at


@given(looks=LOOKS, deepest=DEEPEST, each=st.floats(0.1, 2))
def test_lasting_strain_leads_to_the_last_degree_and_lasting_calm_back(
    looks: list[tuple[bool, float]], deepest: int, each: float
) -> None:
    *_, (now, _, found) = followed(looks, deepest)
    for _ in range(int(deepest * (SETTLE_SECONDS + 2) / each) + 2):
        now += each
        found = found.next(True, now, deepest)
    assert found.degree == deepest
    for _ in range(int((deepest + 1) * (LONGEST_SECONDS + 2) / each) + 2):
        now += each
        found = found.next(False, now, deepest)
    assert (found.degree, found.hold) == (1, SHORTEST_SECONDS)


def test_what_fails_again_and_again_is_tried_ever_less_often() -> None:
    # Strain comes back with every degree that is taken back: a sawtooth, each tooth twice as long.
    now, found, rises = 0.0, Policy(), []
    while now < 3000:
        now += 1
        before, found = found, found.next(found.degree < 3, now, 3)
        if found.degree < before.degree:
            rises.append(now)
    waits = [later - earlier for earlier, later in pairwise(rises)]
    assert all(wait >= 1.8 * last for last, wait in pairwise(waits[:5]))
    assert max(waits) <= LONGEST_SECONDS + 2


# --- the same weights


@contextmanager
def each_look(seconds: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, so many seconds pass at each look, and none asleep."""
    with monkeypatch.context() as patch:
        patch.setattr(courtesy, "time", Clock(each=seconds, naps=False))
        yield


def weights(run: Training) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in copy_weights(run.module).items()}


def trained(
    kind: str, count: int, heard: object = None, folder: Path | None = None
) -> tuple[dict[str, bytes], list[str]]:
    """The weights of a training on so many threads, and what it told."""
    told: list[str] = []
    with threads(count):
        run = training(kind, heard, folder, progress=lambda text, _done: told.append(text))
        run.run()
    return weights(run), told


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[str, bytes]]:
    return {kind: trained(kind, 2)[0] for kind in ("table", "text", "image")}


@pytest.mark.accept
@pytest.mark.parametrize("kind", ["table", pytest.param("text", marks=pytest.mark.accept), "image"])
@given(strains=st.lists(st.booleans(), max_size=20))
@settings(max_examples=4)
def test_whoever_gives_way_anywhere_ends_with_the_same_weights(
    kind: str, strains: list[bool], undisturbed: dict[str, dict[str, bytes]]
) -> None:
    with pytest.MonkeyPatch.context() as patch, each_look(6, patch), TemporaryDirectory() as folder:
        assert trained(kind, 2, hearing(strains), Path(folder))[0] == undisturbed[kind]


@pytest.mark.accept
@pytest.mark.parametrize("kind", ["table", "text", "image"])
def test_every_degree_leaves_the_weights_as_they_are(
    kind: str, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    with each_look(6, monkeypatch):
        found, told = trained(kind, 2, hearing([False, True, True, True]), tmp_path)
    assert found == undisturbed[kind]
    cores = len(os.sched_getaffinity(0))
    degrees = [text.partition(": ")[2] for text in told if text.startswith("gives way to serving (p99 12 ms > 5 ms)")]
    assert degrees[0] == "lowest priority"
    assert len(degrees) == min(cores, 2) + 1
    assert degrees[-1] == "paused"
    assert cores == 1 or degrees[1] == f"1 of {cores} cores"
    assert any(text.startswith("takes back") for text in told)
    assert (tmp_path / "checkpoint-a").exists()


# --- what a process takes


def held(thread: int) -> tuple[int, int, set[int]]:
    return os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread), os.sched_getaffinity(thread)


def every() -> dict[int, tuple[int, int, set[int]]]:
    """Of all threads; those that end while they are asked, an earlier test's, are left out."""
    found = {}
    for entry in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            found[int(entry.name)] = held(int(entry.name))
    return found


def of_both(
    before: dict[int, tuple[int, int, set[int]]], after: dict[int, tuple[int, int, set[int]]]
) -> list[dict[int, tuple[int, int, set[int]]]]:
    """The same of the threads that are there before and after."""
    return [{thread: held[thread] for thread in before.keys() & after.keys()} for held in (before, after)]


def test_all_threads_are_lowered_and_restored() -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait, daemon=True)
    other.start()
    before, cores = every(), os.sched_getaffinity(0)
    priority = Priority()
    priority.lower(priority.cores)
    assert {(policy, nice) for policy, nice, _ in every().values()} == {(os.SCHED_BATCH, 10)}
    priority.lower(1, idle=True)
    assert {(policy, tuple(on)) for policy, _, on in every().values()} == {(os.SCHED_IDLE, (max(cores),))}
    younger = threading.Thread(target=done.wait, daemon=True)
    younger.start()
    priority.lower(priority.cores)
    assert {tuple(on) for _, _, on in every().values()} == {tuple(cores)}
    priority.restore()
    after = every()
    done.set()
    other.join()
    younger.join()
    was, became = of_both(before, after)
    assert was == became
    assert set(map(str, after.values())) == {str(before[os.getpid()])}


def test_threads_that_end_meanwhile_are_no_trouble() -> None:
    done = threading.Event()

    def others() -> None:
        while not done.is_set():
            other = threading.Thread(target=str)
            other.start()
            other.join()

    starting = threading.Thread(target=others)
    starting.start()
    try:
        for _ in range(500):
            priority = Priority()
            priority.lower(priority.cores)
            priority.restore()
    finally:
        done.set()
        starting.join()


def test_who_may_not_raise_a_priority_keeps_a_low_one() -> None:
    # In a process that drops its rights first: nobody, by its number.
    script = (
        "import os, resource\n"
        "from isthmus.distill.throttle.priority import Priority\n"
        "resource.setrlimit(resource.RLIMIT_NICE, (0, 0))\n"
        "os.getuid() or (os.setgid(65534), os.setuid(65534))\n"
        "one = Priority()\n"
        "one.lower(1, idle=True)\n"
        "one.restore()\n"
        "print(os.sched_getscheduler(0) == os.SCHED_IDLE, os.getpriority(os.PRIO_PROCESS, 0), one.cores == "
        "len(os.sched_getaffinity(0)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "10", "True"]


def test_without_a_server_nothing_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    before = every()
    with each_look(6, monkeypatch):
        giving = Throttle(lambda: None, lambda _text: None, 2)
        assert not any(giving.update() for _ in range(20))
        was, became = of_both(before, every())
        assert was == became
        giving.end()


# --- pauses


def test_a_pause_is_no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with each_look(6, monkeypatch):
        found = training("table", hearing([True] * 40), tmp_path).train().state
    assert found.paused > 20 * 6
    assert found.slowed > 0
    # Only what passed by the wall is work, which those seconds did not; and they were taken off it.
    assert found.seconds < 60 - found.paused


def test_what_is_done_before_a_pause_is_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = Spent()
    monkeypatch.setattr(courtesy, "time", clock)
    monkeypatch.setattr(loop, "time", clock)

    def stepping(*asked: Any) -> Any:
        clock.now += 10
        return squares(*asked)

    def evaluate(_module: object) -> dict[str, float]:
        clock.now += 100
        return {"error": 1.0}

    run = training("table", hearing([True] * 60), tmp_path, step=stepping, evaluate=evaluate)
    _, found, paused = replace(run, settings=replace(run.settings, evaluate_every=1)).train()
    worked = STEPS * (10 + 100)
    assert found.paused > 50
    assert found.seconds == pytest.approx(worked)
    assert found.paused == pytest.approx(clock.now - worked)
    assert paused == pytest.approx(found.paused)
    assert 0 < found.slowed < worked


def test_several_processes_do_not_wait_for_one_that_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    with each_look(6, monkeypatch):
        giving = Throttle(hearing([True] * 20), lambda _text: None, 2, pauses=False)
        assert not any(giving.update() for _ in range(20))
        giving.end()


def test_what_starves_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with each_look(6, monkeypatch):
        giving = Throttle(hearing([True] * 200), told.append, 2)
        while not giving.update():
            pass
        with pytest.warns(RuntimeWarning, match=r"starves: .* 10 minutes \(p99 12 ms > 5 ms\); raise") as warned:
            giving.pause(())
        giving.end()
    assert len(warned) == 1
    assert "gives way to serving: paused for 60 s" in told
    assert sum("starves" in text for text in told) == 1


def test_who_is_not_starved_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with each_look(6, monkeypatch):
        giving = Throttle(hearing([True] * 90), lambda _text: None, 2)
        for _ in range(400):
            if giving.update():
                giving.pause(())
        giving.end()


def test_asking_a_teacher_gives_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []
    clock, waits = Spent(), list[float]()
    monkeypatch.setattr(courtesy, "time", clock)
    with throttled(hearing([True] * 8), lambda *said: told.append(said), 2, waits.append) as progress:
        for n in range(10):
            clock.now += 6
            progress(f"shard {n}", n / 10)
    assert waits == [pytest.approx(clock.now - 10 * 6)]
    assert waits[0] > SHORTEST_SECONDS
    paused = [(text, done) for text, done in told if text.endswith(": paused")]
    assert len(paused) == 1
    assert 0 < paused[0][1] < 0.5
    assert told[-1] == ("shard 9", 0.9)
    with throttled(None, lambda *said: told.append(said), 2, waits.append) as progress:
        progress("alone", 1.0)
    assert told[-1] == ("alone", 1.0)
    assert len(waits) == 1


def test_who_fails_while_it_gives_way_gives_nothing_any_more() -> None:
    def telling(text: str, _done: float) -> None:
        raise OSError(text)

    before = every()
    with pytest.raises(OSError, match="lowest priority"), throttled(lambda: STRAINED, telling, 2, list[float]().append):
        pass
    was, became = of_both(before, every())
    assert was == became


# --- a process that pauses


def until(process: "subprocess.Popen[str]", text: str) -> None:
    """Reads what a process says, up to this."""
    assert process.stdout
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without saying {text!r}")


@contextmanager
def pausing(folder: Path, result: Path, patience: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.distill.pausing", "table", str(folder), str(result), str(patience)]
    environment = {**os.environ, "GOMP_SPINCOUNT": "2000"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield process
        process.kill()


def worked(process: "subprocess.Popen[str]") -> float:
    """CPU seconds of a process (proc(5): fields 14 and 15 of `stat`)."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.accept
@pytest.mark.slowest
def test_a_pause_takes_no_time_of_a_core_and_after_a_kill_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    result = tmp_path / "result"
    with pausing(tmp_path / "run", result, 10**9) as process:
        until(process, ": paused")
        time.sleep(0.5)  # threads that spin stop
        before = worked(process)
        time.sleep(2)
        assert worked(process) - before < 0.2
        assert list((tmp_path / "run").glob("checkpoint-*"))
        process.kill()
        process.wait()
    with pausing(tmp_path / "run", result, 10) as process:
        until(process, "goes on after step")
        until(process, ": paused")
        until(process, "saved")
    with threads(2):
        alone = training("table", steps=40)
        alone.run()
    found = load_file(result)
    assert {name: value.numpy().tobytes() for name, value in found.items()} == weights(alone)


def test_a_signal_in_a_pause_is_obeyed_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(courtesy, "time", Clock(times=50))
    # On a busy machine the signal may take 12 seconds to be sent, which are 10 minutes here.
    monkeypatch.setattr(courtesy, "STARVED_SECONDS", math.inf)

    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        signal.raise_signal(signal.SIGTERM)  # a shell has what it puts into the background ignore SIGINT

    def counted(*asked: Any) -> Any:
        assert not sent, "no step is begun any more"
        return squares(*asked)

    def progress(text: str, _done: float) -> None:
        if text.endswith(": paused"):
            threading.Timer(0.3, interrupt).start()

    run = training("table", lambda: STRAINED, tmp_path, 10_000, step=counted, progress=progress)
    with pytest.raises(Stopped, match="stopped by SIGTERM after step"):
        run.run()
    assert time.monotonic() - sent[0] < 2
    assert list(tmp_path.glob("checkpoint-*"))
