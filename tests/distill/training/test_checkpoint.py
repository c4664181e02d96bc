import io
import json
import os
import random
import resource
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from isthmus.distill.training.checkpoint import Checkpoints, RunState, copy_weights, discard, pack, restore
from isthmus.features.errors import DependencyError
from tests.distill import tiny

KILLS = int(os.environ.get("TEST_KILLS", "2"))
TENSORS = {"weights": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3, dtype=torch.uint8)}


def checkpoints(folder: Path, notes: list[str], identity: str = "run") -> Checkpoints:
    return Checkpoints(folder, identity, notes.append)


def written(folder: Path, *steps: int, identity: str = "run") -> None:
    kept = checkpoints(folder, [], identity)
    kept.latest()
    for step in steps:
        standing = RunState(step, best=0.1 + step, sums={"loss": 1 / 3}, summed=1, history=[{"step": 1, "loss": 0.5}])
        kept.write(standing, TENSORS)


def test_the_last_two_are_kept_and_the_last_is_read(tmp_path: Path) -> None:
    assert checkpoints(tmp_path, []).latest() is None
    written(tmp_path, 1, 2, 3)
    assert len([*tmp_path.iterdir()]) == 2
    notes: list[str] = []
    found = checkpoints(tmp_path, notes).latest()
    assert found is not None
    standing, tensors = found
    assert standing == RunState(3, best=3.1, sums={"loss": 1 / 3}, summed=1, history=[{"step": 1, "loss": 0.5}])
    assert all(
        torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype for name, value in TENSORS.items()
    )
    assert notes == []


def test_a_run_that_goes_on_never_replaces_its_only_good_checkpoint(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    for step in (3, 4, 5):
        written(tmp_path, step)
        steps = {json.loads(file.read_bytes())["standing"]["step"] for file in tmp_path.glob("*/record.json")}
        assert steps == {step - 1, step}


def test_there_is_no_pickle(tmp_path: Path) -> None:
    written(tmp_path, 1)
    assert {file.name for file in tmp_path.glob("*/*")} == {"tensors.safetensors", "record.json", "SHA256SUMS"}


def newest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda place: json.loads((place / "record.json").read_bytes())["standing"]["step"])


@pytest.mark.parametrize("name", ["tensors.safetensors", "record.json", "SHA256SUMS"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "gone"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str, damage: str) -> None:
    written(tmp_path, 1, 2)
    file = newest(tmp_path) / name
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[: 0 if damage == "empty" else -1])
    notes: list[str] = []
    found = checkpoints(tmp_path, notes).latest()
    assert found is not None
    assert found[0].step == 1
    (note,) = notes
    assert "is skipped" in note
    assert str(file.parent) in note


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    written(tmp_path, 1)
    chance = random.Random(3)
    files = list(newest(tmp_path).iterdir())
    for _ in range(100):
        file = chance.choice(files)
        content = file.read_bytes()
        place = chance.randrange(len(content))
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :])
        assert checkpoints(tmp_path, []).latest() is None
        file.write_bytes(content)
    assert checkpoints(tmp_path, []).latest() is not None


def test_the_checkpoint_of_another_run_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    notes: list[str] = []
    assert checkpoints(tmp_path, notes, "another").latest() is None
    assert len(notes) == 2
    assert all("a run with other settings, data or shapes" in note for note in notes)
    written(tmp_path, 7, 8, identity="another")
    found = checkpoints(tmp_path, [], "another").latest()
    assert found is not None
    assert found[0].step == 8


def test_every_setting_but_those_of_checkpoints_makes_another_run() -> None:
    settings = tiny.SETTINGS.identity()
    missing = {field.name for field in fields(tiny.SETTINGS)} - settings.keys()
    assert missing == {"checkpoint_steps", "checkpoint_seconds"}
    assert replace(tiny.SETTINGS, seed=1).identity() != settings


def test_discarding_leaves_everything_else(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    (tmp_path / ".checkpoint-a-host-0123456789abcdef").mkdir()
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    discard(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["events.out.tfevents.1"]


def test_a_full_disk_keeps_the_earlier_checkpoints(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = checkpoints(tmp_path, [])
    kept.latest()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(
            DependencyError, match=r"the checkpoint of step 3 cannot be written: .*Make room there"
        ) as told:
            kept.write(RunState(3), {"weights": torch.zeros(1 << 16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(told.value)
    assert len([*tmp_path.iterdir()]) == 2
    assert {json.loads(file.read_bytes())["standing"]["step"] for file in tmp_path.glob("*/record.json")} == {1, 2}
    kept.write(RunState(3), TENSORS)
    found = checkpoints(tmp_path, []).latest()
    assert found is not None
    assert found[0].step == 3


class Tied(nn.Module):
    """Two names for one tensor, one that is not trained, and one whose strides are not those of a file."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.images = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(2)
        self.first.bias.requires_grad_(False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.images(self.second(self.first(numbers))))
        return result


def trained(module: Tied, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for n in range(steps):
        numbers = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        module(numbers).square().sum().backward()
        optimizer.step()


def test_all_of_a_module_and_its_optimizer_comes_back(tmp_path: Path) -> None:
    def new() -> tuple[Tied, torch.optim.Optimizer]:
        module = Tied()
        return module, torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], fused=True)

    module, optimizer = new()
    trained(module, optimizer, 3)
    best = copy_weights(module)
    trained(module, optimizer, 3)
    kept = checkpoints(tmp_path, [])
    kept.write(RunState(6), pack(module, optimizer, best))
    trained(module, optimizer, 3)
    again, other = new()
    found = checkpoints(tmp_path, []).latest()
    assert found is not None
    assert all(torch.equal(value, best[name]) for name, value in restore(found[1], again, other).items())
    assert again.second.weight is again.first.weight
    trained(again, other, 3)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in again.state_dict().items())


@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.thorough
def test_killed_at_any_step_the_weights_are_the_same_to_the_bit(tmp_path: Path) -> None:
    steps, chance = 40, random.Random(KILLS)
    kills = sorted(chance.sample(range(1, steps - 4), KILLS))
    starts = []
    for last in kills:
        command = [sys.executable, "-m", "tests.distill.tiny", str(tmp_path / "killed"), "-", str(steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            said = map(int, child.stdout)
            starts.append(first := next(said))
            while first < last:
                first = next(said)
            time.sleep(chance.uniform(0, 0.02))  # within a step, an evaluation or a checkpoint
            child.kill()
    heard = io.StringIO()
    killed = tiny.run(tmp_path / "killed", steps, heard=heard)
    starts.append(int(heard.getvalue().split()[0]))
    # Each went on from where the one before was killed, or some steps later: it ran on until it died.
    assert starts[0] == 0
    assert all(first >= last for last, first in zip(kills, starts[1:], strict=True))
    alone = tiny.run(None, steps)
    assert killed.state.history == alone.state.history
    assert same(killed.module, alone.module)
    assert not same(alone.module, tiny.Tiny())
    left = {file.name for file in (tmp_path / "killed").iterdir() if not file.name.startswith("events.out")}
    assert left == {"checkpoint-a", "checkpoint-b"}


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
