import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from isthmus.distill.accelerator import accelerator
from isthmus.distill.settings import Settings
from isthmus.distill.training import loop
from isthmus.distill.training.loop import Outcome, Training
from isthmus.distill.training.parts import Step
from isthmus.distill.training.runlog import RunLog
from isthmus.features.errors import ConfigurationError, DependencyError, GateFailed, Stopped
from isthmus.features.profiles import TrainingProfile
from isthmus.features.progress import silent
from tests.distill import fading, tiny
from tests.distill.tiny import ROWS, SETTINGS, Line, Tiny, cpu, evaluate, line, step
from tests.distill.training.test_checkpoint import same

NEAR: dict[str, Any] = {"rtol": 0, "atol": 1e-5}
Batch = tuple[torch.Tensor, torch.Tensor]
Stepped = tuple[torch.Tensor, Mapping[str, torch.Tensor]]


def train(how: Settings, *, step: Step = step, dropout: float = 0.3, **more: Any) -> Outcome:
    options = {"data": line(), "evaluate": evaluate, **more}
    training = Training(Tiny(dropout), step=step, settings=how, accelerator=cpu(), **options)
    return training.train()


class Killed(Exception):
    """What ends a run where a test wants it."""


def killing(at: int) -> Step:
    """A step that dies the so manieth time."""
    calls = iter(range(at))

    def dying(module: nn.Module, batch: Batch, done: float) -> Stepped:
        if next(calls, None) is None:
            raise Killed
        return step(module, batch, done)

    return dying


# --- what is computed


def test_one_batch_of_all_rows_is_a_plain_loop() -> None:
    how = Settings(steps=20, batch=ROWS, learning_rate=0.03, weight_decay=0.1, clip=0.7)
    module, data = Tiny(0.0), line()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.03, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: how.rate(number, 20))
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(data.numbers), data.answers).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 0.7)
        optimizer.step()
        schedule.step()
    close(train(how, dropout=0.0).module, module)


def close(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-4, atol=1e-5)


@given(batch=st.integers(1, 60), parts=st.integers(2, 70))
@settings(max_examples=20)
def test_parts_of_a_batch_are_the_batch(batch: int, parts: int) -> None:
    how = replace(SETTINGS, steps=8, batch=batch)
    whole, divided = (train(replace(how, accumulation=number), dropout=0.0) for number in (1, parts))
    close(whole.module, divided.module)
    for one, other in zip(whole.state.history, divided.state.history, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.accept
@given(
    how=st.builds(
        replace, st.just(SETTINGS), batch=st.integers(5, 60), accumulation=st.integers(1, 3),
        evaluate_every=st.none() | st.integers(1, 12), checkpoint_steps=st.none() | st.integers(1, 12),
        patience=st.none() | st.integers(1, 3), clip=st.none() | st.just(1.0),
        schedule=st.sampled_from(["cosine", "linear", "constant"]), seed=st.integers(0, 2**63 - 1),
        best=st.sampled_from(["min", "max"]),
    ),
    kills=st.lists(st.integers(0, 30), max_size=4),
)  # fmt: skip
@settings(max_examples=25)
def test_a_run_that_died_anywhere_ends_as_if_it_had_not(how: Settings, kills: list[int]) -> None:
    alone = train(how)
    with TemporaryDirectory() as folder:
        for at in kills:
            with suppress(Killed):
                train(how, step=killing(at), folder=Path(folder))
        again = train(how, folder=Path(folder))
        # What was done twice took its time twice, and memory is the process's.
        found, expected = (structs.replace(run.state, seconds=0, peak=0) for run in (again, alone))
        assert found == expected
        assert same(again.module, alone.module)
        # Over is over: nothing is trained again.
        assert same(train(how, step=killing(0), folder=Path(folder)).module, alone.module)


class Watched(Line):
    """Notes which rows are asked for."""

    def __init__(self, rows: int) -> None:
        super().__init__(line(rows).numbers, line(rows).answers)
        self.asked: list[list[int]] = []

    def __getitem__(self, rows: torch.Tensor) -> Batch:
        self.asked.append(rows.tolist())
        return super().__getitem__(rows)


@given(rows=st.integers(1, 70), batch=st.integers(1, 80), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=20)
def test_every_epoch_has_every_row_once_in_an_order_of_its_own(rows: int, batch: int, seed: int) -> None:
    data = Watched(rows)
    train(Settings(epochs=2, batch=batch, seed=seed), data=data)
    each = math.ceil(rows / batch)
    first, second = (list(chain(*data.asked[start : start + each])) for start in (0, each))
    assert len(data.asked) == 2 * each
    assert sorted(first) == sorted(second) == list(range(rows))
    assert first != second or rows < 10
    other = Watched(rows)
    train(Settings(epochs=2, batch=batch, seed=seed + 1 if seed < 2**63 - 1 else 0), data=other)
    assert data.asked != other.asked or rows < 10


def test_what_ran_before_changes_nothing_and_nothing_is_changed_after() -> None:
    state, handlers = torch.get_rng_state(), [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    first = train(SETTINGS)
    assert torch.equal(state, torch.get_rng_state())
    assert handlers == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    torch.rand(3)
    second = train(SETTINGS)
    assert same(first.module, second.module)
    assert not same(first.module, train(replace(SETTINGS, seed=1)).module)
    assert not first.module.training
    assert not {"forward", "_is_accelerate_prepared"} & vars(first.module).keys()


# --- settings


@given(total=st.integers(1, 300), warm_up=st.floats(0, 1), schedule=st.sampled_from(["cosine", "linear", "constant"]))
def test_the_learning_rate_rises_then_falls(total: int, warm_up: float, schedule: Any) -> None:
    how = Settings(steps=total, warm_up=warm_up, schedule=schedule)
    rates = [how.rate(number, total) for number in range(total)]
    top = rates.index(max(rates))
    assert all(0 < value <= 1 for value in rates)
    assert max(rates) > 0.99 or total < 300
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert how.rate(total, total) in (0.0, 1.0)


def test_all_that_is_wrong_is_said_at_once() -> None:
    how = Settings(epochs=1, steps=2, batch=0, learning_rate=math.nan, patience=1, warm_up=2)
    with pytest.raises(ConfigurationError) as raised:
        train(how)
    assert [problem.where for problem in raised.value.problems] == [
        f"training: {name}" for name in ("batch", "steps", "learning_rate", "warm_up", "patience")
    ]
    with pytest.raises(ConfigurationError, match="gate: 'auc'; expected error"):
        train(replace(SETTINGS, gate="auc"))


# --- the gate


def scores(values: list[float]) -> Any:
    """An evaluation that says these, one after the other."""
    left = iter(values)
    return lambda _module: {"score": next(left)}


@pytest.mark.parametrize(
    ("best", "values", "patience", "stops", "kept"),
    [
        ("max", [1, 3, 2, 2, 5], None, 5, 5),
        ("max", [1, 3, 2, 2, 5], 2, 4, 2),
        ("min", [1, 3, 2, 2, 5], None, 5, 1),
        ("min", [4, 3, 3, 2, 2], 2, 5, 4),
        ("max", [2, 2, 2, 2, 2], 1, 2, 1),
        ("max", [3, 2, 4, 3, 5], 2, 5, 5),
    ],
)
def test_the_weights_of_the_best_evaluation_are_kept(
    best: Any, values: list[float], patience: int | None, stops: int, kept: int
) -> None:
    how = replace(SETTINGS, steps=25, evaluate_every=5, gate="score", best=best, patience=patience)
    seen: list[dict[str, torch.Tensor]] = []
    asked = scores(values)

    def score(module: nn.Module) -> Any:
        assert not module.training
        seen.append({name: value.clone() for name, value in module.state_dict().items()})
        return asked(module)

    found = train(how, evaluate=score)
    assert [entry["step"] for entry in found.state.history] == [5 * (n + 1) for n in range(stops)]
    assert all(torch.equal(value, seen[kept - 1][name]) for name, value in found.module.state_dict().items())


@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_early_stop_is_said_when_it_comes_and_when_it_is_resumed(tmp_path: Path, accumulation: int) -> None:
    how = replace(SETTINGS, evaluate_every=5, gate="score", best="max", patience=2, accumulation=accumulation)
    told: list[str] = []

    def run() -> Outcome:
        measure = scores([1, 3, 2, 2, 5])
        return train(how, evaluate=measure, folder=tmp_path, progress=lambda text, _done: told.append(text))

    first = run()
    assert told[-1] == "stopped early at step 20 of 30: no better score in 2 evaluations"
    told.clear()
    again = run()
    assert told == ["is trained already, to step 20 of 30"]
    assert again.state == first.state
    assert same(again.module, first.module)


def test_without_a_gate_the_last_weights_are_kept_and_the_last_step_is_evaluated() -> None:
    found = train(replace(SETTINGS, gate=None, steps=10, evaluate_every=4))
    assert [entry["step"] for entry in found.state.history] == [4, 8, 10]
    assert evaluate(found.module)["error"] == found.state.history[-1]["error"]
    assert found.state.history[0].keys() == {"step", "squares", "loss", "gradient", "error"}


# --- what is not finite


def poisoned(at: int, name: str) -> Step:
    """A step in which, the so manieth time, something becomes infinite."""
    calls = iter(range(1, 1000))

    def poison(module: nn.Module, batch: Batch, done: float) -> Stepped:
        loss, terms = step(module, batch, done)
        if next(calls) == at:
            if name == "gradient":
                # The root of zero is zero, its slope is not finite.
                return loss + (loss - loss).abs().sqrt(), terms
            return (loss * math.inf, {"squares": loss.detach() * math.inf} if name == "squares" else terms)
        return loss, terms

    return poison


@pytest.mark.parametrize("name", ["squares", "loss", "gradient"])
def test_what_is_not_finite_stops_with_the_best_weights_so_far(tmp_path: Path, name: str) -> None:
    with pytest.raises(GateFailed, match=rf"training: step 12 of 30, epoch 3: {name} is (inf|nan); expected") as raised:
        train(SETTINGS, step=poisoned(12, name), folder=tmp_path)
    assert "lower learning_rate" in raised.value.remedy.lower()
    # Its last checkpoint is from before.
    going: list[str] = []
    found = train(SETTINGS, folder=tmp_path, progress=lambda text, _done: going.append(text))
    assert going[0] == "goes on after step 11 of 30"
    assert same(found.module, train(SETTINGS).module)


def test_a_gradient_that_is_not_measured_is_found_before_weights_are_kept(tmp_path: Path) -> None:
    how = replace(SETTINGS, clip=None)
    with pytest.raises(GateFailed, match=r"step 12 of 30, epoch 3: a weight is nan"):
        train(how, step=poisoned(12, "gradient"), folder=tmp_path)
    module = Tiny()
    early = replace(how, checkpoint_steps=None, evaluate_every=10)
    with pytest.raises(GateFailed, match=r"step 13 of 30, epoch 4: squares is nan"):
        Training(module, line(), poisoned(12, "gradient"), early, cpu(), evaluate).run()
    with suppress(Killed):
        other = Training(Tiny(), line(), killing(11), early, cpu(), evaluate)
        other.run()
    assert same(module, other.module)


def test_a_metric_that_is_not_finite_stops() -> None:
    with pytest.raises(GateFailed, match=r"step 14 of 30, epoch 4: score is nan"):
        train(replace(SETTINGS, gate="score"), evaluate=scores([1.0, math.nan]))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), None])
def test_a_full_memory_is_said_with_what_helps(error: Exception | None) -> None:
    def greedy(module: nn.Module, batch: Batch, done: float) -> Stepped:
        if error:
            raise error
        torch.empty(1 << 55)
        return step(module, batch, done)

    with pytest.raises(DependencyError, match=r"step 1: the memory of cpu is full with 8 rows") as raised:
        train(replace(SETTINGS, accumulation=2), step=greedy)
    assert raised.value.remedy == "raise accumulation (2), which keeps the results, or lower batch (16)"


def test_other_errors_are_left_alone() -> None:
    def wrong(module: nn.Module, batch: Batch, done: float) -> Stepped:
        raise RuntimeError("mat1 and mat2 shapes")

    with pytest.raises(RuntimeError, match="mat1"):
        train(SETTINGS, step=wrong)


# --- signals


def signalled(at: int, number: int) -> Step:
    """A step during which, the so manieth time, this process receives a signal."""
    calls = iter(range(1, 1000))

    def signalling(module: nn.Module, batch: Batch, done: float) -> Stepped:
        if next(calls) == at:
            os.kill(os.getpid(), number)
        return step(module, batch, done)

    return signalling


@pytest.fixture
def heeded() -> Iterator[None]:
    """SIGINT does what it does in a terminal: a shell has it ignored by what it puts into the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("at", [1, 12, 30])
def test_a_signal_ends_the_run_in_order(tmp_path: Path, number: signal.Signals, code: int, at: int) -> None:
    # With more and more of an error the first weights are the best: they have to be kept beside the last ones.
    how, before = replace(SETTINGS, checkpoint_steps=None, best="max"), signal.getsignal(number)
    with pytest.raises(Stopped) as raised:
        train(how, step=signalled(at, number), folder=tmp_path)
    assert raised.value.exit_code == code
    assert str(raised.value) == (
        f"training: stopped by {number.name} after step {at} of 30. The same command goes on from there"
    )
    assert signal.getsignal(number) is before
    notes: list[str] = []
    again = train(how, folder=tmp_path, progress=lambda text, _done: notes.append(text))
    assert notes[0] == ("is trained already, to step 30 of 30" if at == 30 else f"goes on after step {at} of 30")
    assert same(again.module, train(how).module)


@pytest.mark.usefixtures("heeded")
def test_a_second_signal_does_what_it_did_before() -> None:
    def impatient(module: nn.Module, batch: Batch, done: float) -> Stepped:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return step(module, batch, done)

    with pytest.raises(KeyboardInterrupt):
        train(SETTINGS, step=impatient)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        train(SETTINGS, step=signalled(5, signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_beside_the_main_thread_signals_are_not_touched() -> None:
    handlers: set[Any] = set()
    found: list[Outcome] = []

    def looking(module: nn.Module, batch: Batch, done: float) -> Stepped:
        handlers.add(signal.getsignal(signal.SIGTERM))
        return step(module, batch, done)

    thread = threading.Thread(target=lambda: found.append(train(SETTINGS, step=looking)))
    thread.start()
    thread.join()
    assert handlers == {signal.getsignal(signal.SIGTERM)}
    assert same(found[0].module, train(SETTINGS).module)


# --- what is told


def test_progress_says_place_rate_and_remaining_time() -> None:
    told: list[tuple[str, float]] = []
    train(
        Settings(epochs=3, batch=16), progress=lambda text, done: told.append((text, done))
    )  # fmt: skip
    texts, shares = zip(*told, strict=True)
    assert list(shares) == pytest.approx([1 / 3, 2 / 3, 1])
    for n, text in enumerate(texts):
        assert text.startswith(f"epoch {n + 1} of 3: loss ")
        assert "error" in text
        assert "rows/s" in text
        assert text.endswith(" s left")


def test_event_files_have_losses_by_term_rate_and_metrics(tmp_path: Path) -> None:
    def slow(module: nn.Module, batch: Batch, done: float) -> Stepped:
        if done == 4 / 30:
            time.sleep(1.05)
        return step(module, batch, done)

    (tmp_path / "events.out.tfevents.1.old").write_bytes(b"of an earlier run")
    train(SETTINGS, step=slow, folder=tmp_path)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    names = {f"evaluation/{name}" for name in ("error", "loss", "squares", "gradient")}
    names |= {f"step/{name}" for name in ("loss", "squares", "gradient", "learning_rate")}
    assert set(read.Tags()["scalars"]) == names
    assert [point.step for point in read.Scalars("evaluation/error")] == [7, 14, 21, 28, 30]
    points = [point.step for point in read.Scalars("step/loss")]
    assert points[0] == 5
    assert len(points) < 5  # a busy machine may take another second
    assert len([*tmp_path.glob("events.out.*")]) == 1


def test_event_files_keep_what_was_measured_at_the_step_that_training_resumes_after(tmp_path: Path) -> None:
    for first, steps in ((0, (7, 14, 21)), (14, (21, 28))):
        log = RunLog(silent, 30, tmp_path)
        log.begin(first)
        for at in steps:
            log.evaluation(at, {"loss": float(first)}, {}, "")
        log.end()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    found = [(point.step, point.value) for point in read.Scalars("evaluation/loss")]
    assert found == [(7, 0.0), (14, 0.0), (21, 14.0), (28, 14.0)]


# --- devices and processes


@pytest.mark.accept
@pytest.mark.parametrize("profile", [TrainingProfile(precision="bf16"), TrainingProfile(compile=True)])
def test_what_the_machine_has_trains_and_the_rest_is_refused(profile: TrainingProfile) -> None:
    refused: DependencyError | None = None
    try:
        joined = accelerator(profile)
    except DependencyError as error:
        refused = error
    if refused:
        assert "profiles.training." in refused.where
        assert refused.remedy.startswith("set ")
        return
    module = Tiny(0.0)
    Training(module, line(), step, replace(SETTINGS, steps=3), joined, evaluate).run()
    torch.testing.assert_close(module.state_dict(), train(replace(SETTINGS, steps=3), dropout=0.0).module.state_dict(),
                               rtol=0.1, atol=0.05)  # fmt: skip
    assert module(line().numbers).dtype == torch.float32
    assert not {"forward", "_original_forward", "_is_accelerate_prepared"} & vars(module).keys()


@pytest.mark.accept
def test_without_a_compiler_compile_is_refused() -> None:
    script = (
        "from isthmus.distill.accelerator import accelerator; from isthmus.features.profiles import TrainingProfile\n"
        "from isthmus.features.errors import DependencyError\n"
        "try: accelerator(TrainingProfile(compile=True))\n"
        "except DependencyError as error: print(error)"
    )
    environment = {**os.environ, "CXX": "/nowhere/g++", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("profiles.training.compile: true, but torch.compile does not work here: ")
    assert "Set compile = false" in done.stdout


def launched(folder: Path, name: str, *arguments: str, module: str = "tests.distill.tiny") -> subprocess.Popen[bytes]:
    """Two processes of a run. On CPUs `accelerate launch` counts processes only under the name of GPUs."""
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
    ]
    options = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    run = ["-m", module, *([str(folder / name)] if module == "tests.distill.tiny" else []), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([*launch, *options, *run], env=environment, stdout=subprocess.PIPE)


@pytest.mark.accept
def test_two_processes_are_one_though_stopped_in_between(tmp_path: Path) -> None:
    with launched(tmp_path, "two", str(tmp_path / "result"), "30", "0", "0") as both:
        assert both.stdout is not None
        next(step for step in both.stdout if int(step) >= 5)
        both.terminate()
        assert both.wait(60) != 0
    with launched(tmp_path, "two", str(tmp_path / "result"), "30", "0", "0") as both:
        said, _ = both.communicate(timeout=120)
        assert both.returncode == 0
        assert int(said.split()[0]) > 5
    first, second = (load_file(tmp_path / f"result.{place}") for place in (0, 1))
    alone = tiny.run(None, 30, dropout=0.0).module
    for name, value in alone.state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.accept
@pytest.mark.slowest
def test_the_first_process_decides_when_two_processes_stop(tmp_path: Path) -> None:
    with launched(tmp_path, "two", str(tmp_path / "result"), "30", "0", "2") as both:
        said, _ = both.communicate(timeout=120)
        assert both.returncode == 0
    assert max(map(int, said.split())) == 9  # it gains at steps 2, 4 and 6; the second process alone gains at 2
    first, second = (load_file(tmp_path / f"result.{place}") for place in (0, 1))
    alone = tiny.run(None, 30, dropout=0.0, patience=2)
    assert [entry["step"] for entry in alone.state.history] == [2, 4, 6, 8, 10]
    for name, value in alone.module.state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.accept
@pytest.mark.parametrize("mode", [
    mode if mode == "from 0 to 0" else pytest.param(mode, marks=pytest.mark.slowest) for mode in fading.WEIGHTS
])  # fmt: skip
def test_two_processes_are_one_though_a_loss_comes_and_goes(tmp_path: Path, mode: str) -> None:
    with launched(tmp_path, "", mode, str(tmp_path / "result"), module="tests.distill.fading") as both:
        said, _ = both.communicate(timeout=120)
        assert both.returncode == 0, said
    first, second = (load_file(tmp_path / f"result.{place}") for place in (0, 1))
    alone, history = fading.run(mode)
    torch.testing.assert_close(first.pop("losses"), torch.tensor([entry["loss"] for entry in history]), **NEAR)
    for name, value in alone.state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, **NEAR)


def test_a_loss_that_comes_and_goes_is_read_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is read every eight steps, in which the names may change."""
    _, wanted = fading.run("from 0 to 0")
    monkeypatch.setitem(loop.LOOK, "cpu", 8)
    assert fading.run("from 0 to 0")[1] == wanted
