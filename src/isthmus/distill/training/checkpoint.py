"""The last two checkpoints of a training run: tensors and a record, each on disk complete or not at all."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import rmtree

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from isthmus.features.errors import DependencyError
from isthmus.features.files import publish

_PLACES = ("checkpoint-a", "checkpoint-b")
_TENSORS, _RECORD, _SUMS = "tensors.safetensors", "record.json", "SHA256SUMS"

Tensors = Mapping[str, torch.Tensor]


class RunState(msgspec.Struct, forbid_unknown_fields=True):
    """The state of a run besides its tensors. Position in the data and learning rate follow from the step.

    Attributes:
        over: whether training has ended, by its last step or by its gate.
        best: the best value of the gate so far; None before the first evaluation.
        waited: evaluations since then.
        sums: sum of the loss and of its terms since the last evaluation, over `summed` steps.
        history: of each evaluation its step, means of loss and terms since the evaluation before, and the metrics.
        seconds: spent in all these steps, also by runs that were stopped, without pauses.
        slowed: seconds of these on fewer cores, because of servers.
        paused: seconds of pauses because of servers.
        peak: bytes of memory of the first process, the largest of all runs that resumed (`device.peak`).
    """

    step: int = 0
    over: bool = False
    best: float | None = None
    waited: int = 0
    sums: dict[str, float] = {}
    summed: int = 0
    history: list[dict[str, int | float]] = []
    seconds: float = 0.0
    slowed: float = 0.0
    paused: float = 0.0
    peak: int = 0


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    identity: str
    state: RunState = msgspec.field(name="standing")


class Checkpoints:
    """The checkpoints of one run, in two folders that take turns: at least one is always complete.

    The identity is a digest of everything the weights depend on. Checkpoints of another run are skipped; `note` is
    called with each that is, and why.
    """

    def __init__(self, folder: Path, identity: str, note: Callable[[str], None]) -> None:
        self._folder, self._identity, self._note = folder, identity, note
        self._next = _PLACES[0]

    def latest(self) -> tuple[RunState, dict[str, torch.Tensor]] | None:
        """State and tensors of the last complete checkpoint; None if there is none."""
        records: dict[str, RunState] = {}
        for place in filter(lambda place: (self._folder / place).exists(), _PLACES):
            try:
                records[place] = self._read(self._folder / place)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                self._note(f"a checkpoint is passed over: {self._folder / place}: {error}")
        for place in sorted(records, key=lambda place: -records[place].step):
            try:
                tensors = load_file(self._folder / place / _TENSORS)
            except (OSError, SafetensorError) as error:
                self._note(f"a checkpoint is passed over: {self._folder / place}: {error}")
                continue
            self._next = _PLACES[1 - _PLACES.index(place)]
            return records[place], tensors
        return None

    def write(self, state: RunState, tensors: Tensors) -> None:
        """Writes a checkpoint in place of the older of the two.

        Raises a DependencyError if the disk is full, or the folder cannot be written; earlier checkpoints stay.
        """
        try:
            publish(self._folder / self._next, lambda fresh: self._fill(fresh, state, tensors))
        except (OSError, SafetensorError) as error:
            raise DependencyError(
                str(self._folder),
                f"the checkpoint of step {state.step} cannot be written: {error}",
                remedy="make room there; the same command goes on from the last checkpoint",
            ) from error
        self._next = _PLACES[1 - _PLACES.index(self._next)]

    def _fill(self, folder: Path, state: RunState, tensors: Tensors) -> None:
        save_file(dict(tensors), folder / _TENSORS)
        record = _Record(self._identity, state)
        (folder / _RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        (folder / _SUMS).write_text(_sums(folder), encoding="ascii")

    def _read(self, folder: Path) -> RunState:
        if (folder / _SUMS).read_text(encoding="ascii") != _sums(folder):
            raise ValueError("its files do not have the SHA-256 sums beside them")
        record = msgspec.json.decode((folder / _RECORD).read_bytes(), type=_Record)
        if record.identity != self._identity:
            raise ValueError("it is of a run with other settings, data, shapes or number of processes")
        return record.state


def copy_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of a module's weights."""
    return {name: weights.detach().clone() for name, weights in module.state_dict().items()}


def pack(module: nn.Module, optimizer: torch.optim.Optimizer, best: Tensors) -> dict[str, torch.Tensor]:
    """The weights of a module, the state of its optimizer and the best weights, on the CPU, ready for a file."""
    tensors = {f"module.{name}": value for name, value in copy_weights(module).items()}
    tensors |= {f"best.{name}": value for name, value in best.items()}
    for place, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{place}.{key}": value for key, value in values.items()}
    return {name: value.cpu().contiguous() for name, value in tensors.items()}


def final(best: Tensors) -> dict[str, torch.Tensor]:
    """Return the part of a checkpoint that a finished run still needs."""
    return {f"best.{name}": value.cpu().contiguous() for name, value in best.items()}


def restore(tensors: Tensors, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Load a checkpoint that `pack` or `final` made. Return the best weights."""
    begin = "best." if all(name.startswith(("best.", "random.")) for name in tensors) else "module."
    weights = {name.removeprefix(begin): value for name, value in tensors.items() if name.startswith(begin)}
    module.load_state_dict(weights)
    best = copy_weights(module)
    for name, value in best.items():
        value.copy_(tensors[f"best.{name}"])
    state: dict[int, dict[str, torch.Tensor]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, place, key = name.split(".")
            like = parameters[int(place)]
            # With the memory layout of the parameter, which a file does not store.
            state.setdefault(int(place), {})[key] = (
                torch.empty_like(like).copy_(value) if value.shape == like.shape else value.clone()
            )
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return best


def discard(folder: Path, *, finished: bool = True) -> None:
    """Removes the checkpoints of a run; without `finished` the last one of a run that is over stays."""
    for place in _PLACES:
        if not finished and _is_over(folder / place):
            continue
        for left in (folder / place, *folder.glob(f".{place}-*")):
            rmtree(left, ignore_errors=True)


def _is_over(place: Path) -> bool:
    try:
        return msgspec.json.decode((place / _RECORD).read_bytes(), type=_Record).state.over
    except (OSError, msgspec.MsgspecError):
        return False


def _sums(folder: Path) -> str:
    lines = []
    for name in (_RECORD, _TENSORS):
        with (folder / name).open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines)
