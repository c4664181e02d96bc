import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from isthmus.distill.outputs import cache, shards
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from isthmus.losses import soft_targets, top_k_targets
from isthmus.teachers import FunctionTeacher, NetworkTeacher, OutputCache, OutputFormat, identities

Array = np.ndarray[Any, Any]

ROWS = 60
X = np.random.default_rng(3).normal(size=(ROWS, 4)).astype(np.float32)
IDS = identities({"x": X})


def answer(batch: Tensor) -> dict[str, Tensor]:
    """Row by row: what is asked beside a row changes nothing of its answer, to the bit."""
    return {"logits": batch[:, :3] * 3 + batch[:, 3:].sin(), "hidden": batch.unsqueeze(-1) * torch.arange(1.0, 3.0)}


class Live:
    """The teacher, with what it was asked; and its answers as they are to be kept."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def batches(self, rows: Array) -> Tensor:
        self.asked += rows.tolist()
        return torch.from_numpy(X[rows])

    def open(self, root: Path, rows: Array = IDS, **more: Any) -> OutputCache:
        given = {"contract": "c", "batch": 7, **more}
        teacher = given.pop("teacher", FunctionTeacher(answer, ["logits", "hidden"], name="large"))
        return OutputCache(root, teacher, rows, given.pop("batches", self.batches), **given)


def wanted(rows: Any, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    return {key: value.to(dtype) for key, value in answer(torch.from_numpy(X[rows])).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[key].dtype == expected[key].dtype and torch.equal(found[key], expected[key]) for key in expected
    )


def kept(root: Path) -> list[Path]:
    return sorted(root.glob("*/shard-*"))


# --- asking


def test_what_is_kept_is_read_and_what_is_missing_is_computed(tmp_path: Path) -> None:
    live = Live()
    with live.open(tmp_path) as kept_outputs:
        assert kept_outputs.missing == len(kept_outputs) == ROWS
        assert same(kept_outputs[[5, 3, 5]], wanted([5, 3, 5]))
        assert live.asked == [3, 5]
        assert kept_outputs.missing == ROWS - 2
        assert same(kept_outputs[np.array([3, 4])], wanted([3, 4]))
        assert same(kept_outputs[torch.tensor([4])], wanted([4]))
        assert same(kept_outputs[-1], wanted([ROWS - 1]))
        assert same(kept_outputs[2:6], wanted([2, 3, 4, 5]))
        assert live.asked == [3, 5, 4, ROWS - 1, 2]
    again = live.open(tmp_path)
    assert again.missing == ROWS - 5
    assert same(again[[5, 4, 3]], wanted([5, 4, 3]))
    assert live.asked == [3, 5, 4, ROWS - 1, 2]
    assert again[[]]["logits"].shape == (0, 3)
    with pytest.raises(IndexError):
        again[[ROWS]]


def test_filling_computes_all_in_order_and_tells_the_rate(tmp_path: Path) -> None:
    live, told = Live(), list[tuple[str, float]]()
    filled = live.open(tmp_path)
    _ = filled[[50, 2]]
    live.asked.clear()
    filled.fill(lambda text, share: told.append((text, share)))
    assert live.asked == [row for row in range(ROWS) if row not in (50, 2)]
    assert filled.missing == 0
    assert told[-1][1] == 1
    assert told[-1][0].startswith("teacher outputs: 60 of 60 rows, ")
    assert told[-1][0].endswith(" rows a second")
    assert [share for _, share in told] == sorted(share for _, share in told)
    order = np.random.default_rng(0).permutation(ROWS)
    assert same(live.open(tmp_path)[order], wanted(order))
    assert len(live.asked) == ROWS - 2


def test_what_another_has_published_meanwhile_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SHARD_SECONDS", 0.0)  # a shard for each batch
    one, other = Live(), Live()
    first, second = one.open(tmp_path), other.open(tmp_path)
    _ = first[:10]
    assert same(second[5:12], wanted(slice(5, 12)))
    assert other.asked == [10, 11]
    turns = iter(range(100))
    first.fill(lambda _text, _share: second.fill() if next(turns) == 1 else None)
    # What it was about to compute is computed twice, and no more.
    assert one.asked == [*range(10), *range(12, 33)]
    assert sorted({*one.asked, *other.asked}) == list(range(ROWS))
    assert same(first[:], wanted(slice(None)))


def test_a_row_is_known_wherever_it_stands_and_rows_of_one_identity_have_one_output(tmp_path: Path) -> None:
    live = Live()
    live.open(tmp_path).fill()
    order = np.concatenate([np.arange(ROWS)[::-1], [4, 4]])
    moved = live.open(tmp_path, IDS[order], teacher=FunctionTeacher(answer, ["logits", "hidden"]).fingerprint())
    assert moved.missing == 0
    assert same(moved[np.arange(len(order))], wanted(order))


def test_without_the_teacher_only_what_is_kept_is_there(tmp_path: Path) -> None:
    live = Live()
    with live.open(tmp_path) as some:
        _ = some[:10]
    alone = live.open(tmp_path, teacher=FunctionTeacher(answer, ["logits", "hidden"]).fingerprint())
    assert same(alone[3:7], wanted(slice(3, 7)))
    with pytest.raises(DataError, match="row 12 has no output; 50 of 60 rows have none"):
        alone[[1, 12]]
    with pytest.raises(DataError, match="fill"):
        alone.fill()


@pytest.mark.parametrize(
    "other",
    [
        {"contract": "d"},
        {"options": {"length": 64}},
        {"form": OutputFormat("float32")},
        {"form": OutputFormat(top_k=2)},
        {"form": OutputFormat(top_k=2, temperature=2.0)},
        {"teacher": FunctionTeacher(answer, ["logits"])},
        {"teacher": FunctionTeacher(answer, ["logits", "hidden"], version="2")},
    ],
)
def test_another_teacher_contract_form_or_option_is_another_folder(tmp_path: Path, other: dict[str, Any]) -> None:
    live = Live()
    first, second = live.open(tmp_path), live.open(tmp_path, **other)
    assert first.path != second.path
    first.fill()
    assert second.missing == ROWS
    assert Live().open(tmp_path, **other).path == second.path


def test_arguments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="options"):
        Live().open(tmp_path, options={"seed": object()})
    with pytest.raises(ConfigurationError, match=r"(?s)batch: 0.*rows: float32 \(60, 4\)"):
        Live().open(tmp_path, X, batch=0)
    with pytest.raises(ConfigurationError, match=r"(?s)3 problems.*temperature.*dtype.*top_k"):
        OutputFormat("float64", 0, -1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"temperature: 2\.0; expected 1 without top_k"):
        OutputFormat(temperature=2.0)


# --- forms


def test_float32_is_kept_as_it_is(tmp_path: Path) -> None:
    live = Live()
    live.open(tmp_path, form=OutputFormat("float32")).fill()
    assert same(live.open(tmp_path, form=OutputFormat("float32"))[:], wanted(slice(None), torch.float32))


def test_what_float16_does_not_hold_is_refused_with_the_remedy(tmp_path: Path) -> None:
    teacher = FunctionTeacher(lambda x: x * torch.tensor([1.0, 1.0, 1.0, 0.0]) + 65504.0 * (x == X[41, 2]) * 1.1)
    with pytest.raises(DataError, match=r'output logits: row 41 holds 720\d\d.*65504.*OutputFormat\(dtype="float32"\)'):
        Live().open(tmp_path, teacher=teacher).fill()
    Live().open(tmp_path, teacher=teacher, form=OutputFormat("float32")).fill()
    largest = FunctionTeacher(lambda x: torch.full_like(x, -65504.0))
    assert (Live().open(tmp_path, teacher=largest)[:3]["logits"] == -65504).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_top_k_are_what_the_loss_takes(tmp_path: Path, dtype: Any) -> None:
    torch.manual_seed(0)
    logits, student = torch.randn(ROWS, 5, 50) * 3, torch.randn(ROWS, 5, 50)
    teacher = FunctionTeacher(lambda rows: logits[rows], version="1")
    form = OutputFormat(dtype, top_k=8, temperature=2.0)
    found = Live().open(tmp_path, teacher=teacher, form=form, batches=torch.from_numpy)[:]
    probabilities, indexes = (logits / 2).softmax(-1).sort(descending=True)
    rtol, atol = (1e-3, 1e-7) if dtype == "float16" else (1e-5, 1e-6)
    torch.testing.assert_close(found["probabilities"].float(), probabilities[..., :8], rtol=rtol, atol=atol)
    torch.testing.assert_close(found["residual"].float(), probabilities[..., 8:].sum(-1), rtol=2e-3, atol=1e-6)
    assert torch.equal(found["indexes"], indexes[..., :8].int())
    loss = top_k_targets(student, found["probabilities"], found["indexes"], temperature=2.0)
    exact = top_k_targets(student, probabilities[..., :8], indexes[..., :8], temperature=2.0)
    torch.testing.assert_close(loss, exact, rtol=1e-3, atol=0)
    # All classes kept: the loss of the logits themselves.
    whole = Live().open(tmp_path, teacher=teacher, form=OutputFormat("float32", 50, 2.0), batches=torch.from_numpy)[:]
    loss = top_k_targets(student, whole["probabilities"], whole["indexes"], temperature=2.0)
    torch.testing.assert_close(loss, soft_targets(student, logits, temperature=2.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("give", "found"),
    [
        (lambda x: x, "top_k: 9; expected at most the 4 classes"),
        (lambda x: x[:, 0], r"output logits: shape \(7,\)"),
        (lambda x: {"logits": x, "residual": x}, "output residual: the teacher returns it"),
    ],
)
def test_the_top_k_of_what_has_none_are_refused(tmp_path: Path, give: Callable[[Tensor], Any], found: str) -> None:
    keys = ["logits", "residual"] if "residual" in found else ["logits"]
    with pytest.raises(ConfigurationError, match=found):
        Live().open(tmp_path, teacher=FunctionTeacher(give, keys), form=OutputFormat(top_k=9)).fill()


def test_outputs_of_changing_sizes_are_refused(tmp_path: Path) -> None:
    teacher = FunctionTeacher(lambda x: x[:, : 2 + (len(x) == 7)])
    with pytest.raises(DataError, match=r"logits float16 \(2,\) for row 56; expected logits float16 \(3,\).*Pad all"):
        Live().open(tmp_path, teacher=teacher).fill()


def test_a_teacher_that_fails_half_way_leaves_what_was_computed(tmp_path: Path) -> None:
    class Failing(Live):
        def batches(self, rows: Array) -> Tensor:
            if 30 in rows:
                raise RuntimeError("out of memory")
            return super().batches(rows)

    with pytest.raises(RuntimeError, match="out of memory"), Failing().open(tmp_path) as filled:
        filled.fill()
    live = Live()
    live.open(tmp_path).fill()
    assert live.asked == list(range(28, ROWS))


# --- shards


def spoil(shard: Path, how: str) -> None:
    logits, record = shard / "logits.npy", shard / "shard.json"
    if how == "flip":
        data = bytearray(logits.read_bytes())
        data[-1] ^= 1
        logits.write_bytes(data)
    elif how == "truncate":
        os.truncate(logits, logits.stat().st_size // 2)
    elif how == "no record":
        record.unlink()
    elif how == "half a record":
        os.truncate(record, record.stat().st_size // 2)
    elif how == "no rows":
        (shard / "_rows.npy").unlink()
    elif how == "gone":
        shutil.rmtree(shard)
    elif how == "pickled":
        np.save(logits, np.array([{}] * ROWS, object), allow_pickle=True)
        text = record.read_text()
        sums = {key: hashlib.sha256((shard / f"{key}.npy").read_bytes()).hexdigest() for key in ("logits",)}
        old = text.split('"logits": "')[1][:64]
        record.write_text(text.replace(old, sums["logits"]))


DAMAGES = ["flip", "truncate", "no record", "half a record", "no rows", "gone", "pickled"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_shard_is_passed_over_with_a_note_and_its_rows_are_computed_again(tmp_path: Path, how: str) -> None:
    for part in (slice(0, 20), slice(20, ROWS)):
        with Live().open(tmp_path) as some:
            _ = some[part]
    first, second = sorted(kept(tmp_path), key=lambda path: path.stat().st_mtime_ns)
    spoil(first, how)
    live, notes = Live(), list[str]()
    filled = live.open(tmp_path, note=notes.append)
    filled.fill()
    assert live.asked == list(range(20))
    assert len(notes) == (how != "gone")
    if notes:
        assert first.name in notes[0]
        assert "is damaged, its rows are computed again" in notes[0]
    assert same(filled[:], wanted(slice(None)))
    assert filled.prune() == 0
    assert not first.exists()
    notes.clear()
    again = live.open(tmp_path, note=notes.append)
    assert (again.missing, notes) == (0, [])
    assert same(again[:], wanted(slice(None)))
    assert second not in kept(tmp_path)  # put together with the other small one


def test_shards_are_verified_once_in_a_process_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Live().open(tmp_path).fill()
    read: list[str] = []
    real = shards._sha256

    def noted(file: Path) -> str:
        read.append(file.name)
        return real(file)

    monkeypatch.setattr(shards, "_sha256", noted)
    Live().open(tmp_path)
    assert read == []
    (shard,) = kept(tmp_path)
    os.utime(shard / "logits.npy")
    Live().open(tmp_path)
    assert sorted(read) == ["_rows.npy", "hidden.npy", "logits.npy"]


def test_a_full_shard_is_published_at_once_and_memory_holds_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = 2 * (3 + 8)
    monkeypatch.setattr(cache, "SHARD_BYTES", 16 * row)
    filled, counts = Live().open(tmp_path), list[int]()
    filled.fill(lambda *_: counts.append(len(kept(tmp_path))))
    # 14 rows to a shard: a third batch of 7 does not fit.
    assert counts == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert len(kept(tmp_path)) == 5
    assert all(sum(array.nbytes for array in shard.arrays.values()) <= 16 * row for shard in filled._shards)
    order = np.random.default_rng(1).permutation(ROWS)
    assert same(filled[order], wanted(order))
    assert same(Live().open(tmp_path)[order], wanted(order))


def test_a_shard_that_has_waited_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SHARD_SECONDS", 0.0)
    some = Live().open(tmp_path)
    _ = some[:5]
    assert len(kept(tmp_path)) == 1
    assert same(some[3:9], wanted(slice(3, 9)))


def test_a_full_disk_is_said_and_what_was_kept_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Live().open(tmp_path) as some:
        _ = some[:10]
    real = np.save

    def save(file: Path, array: Array, **more: Any) -> None:
        if file.name == "logits.npy":
            file.symlink_to("/dev/full")
        real(file, array, **more)

    monkeypatch.setattr(np, "save", save)
    filled = Live().open(tmp_path)
    with pytest.raises(DependencyError, match=r"cannot be written: .*No space left.*Make room there"):
        filled.fill()
    monkeypatch.undo()
    assert len(kept(tmp_path)) == 1
    assert Live().open(tmp_path).missing == ROWS - 10
    filled.flush()  # there is room again
    assert Live().open(tmp_path).missing == 0


def test_pruning_removes_the_rows_that_are_not_asked_for(tmp_path: Path) -> None:
    live = Live()
    for part in (slice(0, 20), slice(20, 40), slice(40, ROWS)):
        with live.open(tmp_path) as some:
            _ = some[part]
    other = live.open(tmp_path, contract="d")
    other.fill()
    live.asked.clear()
    mapped = live.open(tmp_path)
    fewer = live.open(tmp_path, IDS[10:30])
    assert fewer.prune() == 40
    assert len(kept(fewer.path.parent)) == 2
    assert same(fewer[:], wanted(slice(10, 30)))
    assert same(mapped[:], wanted(slice(None)))  # what a reader had mapped it keeps
    assert live.asked == []
    again = live.open(tmp_path)
    assert again.missing == 40
    assert same(again[10:30], wanted(slice(10, 30)))
    assert live.open(tmp_path, contract="d").missing == 0
    assert fewer.prune(others=True) == 0
    assert live.open(tmp_path, contract="d").missing == ROWS
    assert live.open(tmp_path, IDS[10:30]).missing == 0


def test_a_kill_while_pruning_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (slice(0, 20), slice(20, ROWS)):
        with Live().open(tmp_path) as some:
            _ = some[part]

    def killed(_folder: Path, _name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        Live().open(tmp_path, IDS[5:]).prune()
    monkeypatch.undo()
    assert len(kept(tmp_path)) == 3
    live = Live()
    assert same(live.open(tmp_path)[:], wanted(slice(None)))
    assert live.open(tmp_path, IDS[5:]).prune() == 5
    assert len(kept(tmp_path)) == 1
    assert same(live.open(tmp_path, IDS[5:])[:], wanted(slice(5, None)))
    assert live.asked == []


# --- processes

FILL = """
import sys, time
from pathlib import Path
from tests.distill.outputs.test_cache import *
root, pause = Path(sys.argv[1]), float(sys.argv[2])
cache.SHARD_BYTES = 9 * 22
class Slow(Live):
    def batches(self, rows):
        time.sleep(pause)
        return super().batches(rows)
opened = Slow().open(root, batch=3)
print("ready", flush=True)
opened.fill()
"""


def start(root: Path, pause: float) -> "subprocess.Popen[str]":
    place = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[3])])}
    return subprocess.Popen([sys.executable, "-c", FILL, str(root), str(pause)], stdout=subprocess.PIPE, text=True,
                            env=place)  # fmt: skip


@pytest.mark.accept
def test_two_processes_that_fill_one_folder_end_with_all_rows_and_a_killed_one_loses_a_shard(tmp_path: Path) -> None:
    killed, one, other = (
        start(tmp_path / "killed", 0.05),
        start(tmp_path / "two", 0.003),
        start(tmp_path / "two", 0.002),
    )
    assert killed.stdout is not None
    killed.stdout.readline()
    while len(kept(tmp_path / "killed")) < 2:
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.15))
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    # A kill in the middle of a publication leaves a folder that nobody reads, and the next one removes.
    (folder,) = (tmp_path / "killed").iterdir()
    left = folder / f".shard-{socket.gethostname()}-{'0' * 16}" / "new"
    shutil.copytree(kept(tmp_path / "killed")[0], left)
    os.truncate(left / "logits.npy", 100)
    live, notes = Live(), list[str]()
    resumed = live.open(tmp_path / "killed", note=notes.append)
    published = ROWS - resumed.missing
    assert published >= 18
    assert published % 9 == 0
    resumed.fill()
    assert (live.asked, notes) == (list(range(published, ROWS)), [])
    assert same(live.open(tmp_path / "killed")[:], wanted(slice(None)))
    assert {path.name[:6] for path in resumed.path.iterdir()} == {"key.js", "shard-"}

    one.communicate()
    other.communicate()
    assert one.returncode == other.returncode == 0
    whole = live.open(tmp_path / "two")
    assert whole.missing == 0
    assert same(whole[:], wanted(slice(None)))


# --- against the oracle


class Against(RuleBasedStateMachine):
    """Any asks, kills, damages, prunes and reopenings, of two views of the rows, give what the live teacher gives."""

    @initialize(capacity=st.integers(1, 40))
    def begin(self, capacity: int) -> None:
        self.folder = TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.before = cache.SHARD_BYTES
        cache.SHARD_BYTES = capacity * 22
        self.live = Live()
        self.rows = np.arange(ROWS)
        self.oracle: dict[int, dict[str, Tensor]] = {}  # row -> what the live teacher gave, in float16
        self.kept = self.live.open(self.root)

    @rule(places=st.lists(st.integers(0, 11), max_size=12), stride=st.sampled_from([1, 5]))
    def ask(self, places: list[int], stride: int) -> None:
        positions = np.array([place * stride % len(self.rows) for place in places], np.int64)
        rows = self.rows[positions]
        for row in set(rows.tolist()) - set(self.oracle):
            self.oracle[row] = wanted([row])
        found = self.kept[positions]
        for place, row in enumerate(rows.tolist()):
            assert same({key: value[place : place + 1] for key, value in found.items()}, self.oracle[row])

    @rule()
    def fill(self) -> None:
        self.kept.fill()
        assert self.kept.missing == 0
        before = len(self.live.asked)
        assert same(self.kept[:], wanted(self.rows))
        assert len(self.live.asked) == before

    @rule()
    def flush(self) -> None:
        self.kept.flush()

    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        """Without a flush, as after a kill; perhaps in another order, and with fewer rows."""
        self.rows = np.array(data.draw(st.permutations(range(0, ROWS, data.draw(st.sampled_from([1, 2]))))))
        self.kept = self.live.open(self.root, IDS[self.rows], batches=self._batches)

    def _batches(self, places: Array) -> Tensor:
        return self.live.batches(self.rows[places])

    @precondition(lambda self: bool(kept(self.root)))
    @rule(how=st.sampled_from(DAMAGES), newest=st.booleans())
    def damage(self, how: str, newest: bool) -> None:
        found = sorted(kept(self.root), key=lambda path: path.stat().st_mtime_ns)
        with suppress(FileNotFoundError, IndexError):  # it was damaged before
            spoil(found[-1 if newest else 0], how)
        self.kept = self.live.open(self.root, IDS[self.rows], batches=self._batches)

    @rule()
    def prune(self) -> None:
        missing = self.kept.missing
        self.kept.prune()
        assert self.kept.missing <= missing

    @invariant()
    def nothing_else_lies_there(self) -> None:
        if hasattr(self, "kept"):
            assert {path.name[:6] for path in self.kept.path.iterdir()} <= {"key.js", "shard-"}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            cache.SHARD_BYTES = self.before
            self.folder.cleanup()


TestAgainstTheOracle = Against.TestCase
TestAgainstTheOracle.settings = settings(settings(), stateful_step_count=12)


# --- training


def test_training_with_kept_outputs_is_training_with_the_live_teacher_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # In float64: what a row's answer is asked beside shows in bits that float16 does not have.
    teacher = NetworkTeacher(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3)).double())
    x = torch.from_numpy(X)
    saved = OutputCache(tmp_path, teacher, IDS, lambda rows: x[rows].double(), contract="c", batch=16)

    def trained(targets: Callable[[Tensor], Tensor]) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(1)
        student, losses = nn.Linear(4, 3), []
        optimizer = torch.optim.AdamW(student.parameters(), lr=0.05)
        for _ in range(5):
            for rows in torch.split(torch.randperm(ROWS), 13):
                loss = soft_targets(student(x[rows]), targets(rows), temperature=2.0)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.item())
        return losses, [parameter.detach() for parameter in student.parameters()]

    live = trained(lambda rows: teacher.ask(x[rows].double())["logits"].half())
    first = trained(lambda rows: saved[rows]["logits"])
    saved.flush()
    again = trained(lambda rows: saved[rows]["logits"])
    assert live[0] == first[0] == again[0]
    assert live[0][-1] < live[0][0]
    for one, other, third in zip(live[1], first[1], again[1], strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def test_a_teacher_that_is_trained_meanwhile_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(4, 3)
    opened = Live().open(tmp_path, teacher=NetworkTeacher(module))
    module.train()
    with pytest.raises(ConfigurationError, match="is in training mode"):
        opened.fill()


# --- identities


def naive(row: dict[str, Any]) -> str:
    return repr(sorted(row.items()))


@given(
    st.lists(
        st.fixed_dictionaries({
            "key": st.one_of(st.none(), st.text(max_size=3), st.binary(max_size=3), st.integers(-2, 2)),
            "at": st.integers(0, 2),
            "text": st.text("ab", max_size=3),
        }),
        min_size=2,
        max_size=12,
    )
)  # fmt: skip
def test_rows_have_one_identity_if_and_only_if_they_are_the_same(rows: list[dict[str, Any]]) -> None:
    columns = {name: [row[name] for row in rows] for name in ("key", "at", "text")}
    columns["at"] = np.array(columns["at"], np.int64)  # type: ignore[assignment]
    found = [bytes(row) for row in identities(columns)]
    for one, a in zip(rows, found, strict=True):
        for other, b in zip(rows, found, strict=True):
            assert (a == b) == (naive(one) == naive(other))
    backwards = identities(dict(reversed(columns.items())))
    assert [bytes(row) for row in backwards] == found


def test_what_identifies_a_row_is_its_content_and_not_its_place() -> None:
    images = np.random.default_rng(0).integers(0, 255, (5, 2, 3, 3), np.uint8)
    at = [datetime(2026, 1, day, tzinfo=UTC) for day in range(1, 6)]
    whole = identities({"image": images, "at": at})
    assert (identities({"image": torch.from_numpy(images[2:]), "at": at[2:]}) == whole[2:]).all()
    assert (identities({"image": np.asfortranarray(images), "at": at}) == whole).all()
    assert whole.shape == (5, 16)
    assert len(np.unique(whole, axis=0)) == 5
    seeded = [identities({"image": images, "at": at}, seed=seed) for seed in (0, 1)]
    assert not (seeded[0] == whole).all(1).any()
    assert not (seeded[0] == seeded[1]).all(1).any()
    assert not (identities({"image": images.astype(np.int16), "at": at}) == whole).all(1).any()
    table = pa.table({"k": ["a", None, ""], "x": [1.5, None, 0.0], "l": [[1, 2], [], None]})
    found = identities(table)
    at = pa.array([1, None, 3], pa.timestamp("us", "UTC"))
    assert len(np.unique(identities({"at": at}), axis=0)) == 3
    assert not (identities({"at": at}) == identities({"at": at.cast(pa.timestamp("us", "Asia/Tokyo"))})).all(1).any()
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert (identities({"at": [noon]}) == identities({"at": [noon.astimezone(timezone(timedelta(hours=9)))]})).all()
    assert len(np.unique(found, axis=0)) == 3
    assert (identities(table.slice(1)) == found[1:]).all()
    assert identities({"x": np.empty((0, 3))}).shape == (0, 16)
    with pytest.raises(DataError, match="column x: a object"):
        identities({"x": [object()]})
    with pytest.raises(DataError, match="expected columns of one length"):
        identities({"x": [1], "y": [1, 2]})
