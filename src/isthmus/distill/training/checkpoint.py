"""The last two checkpoints of a training run, published atomically, and the folders of the runs of a distillation."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from isthmus.distill.training.sharding import sharded_like, whole
from isthmus.features.errors import DependencyError
from isthmus.features.files import publish, write_atomically

_PROCESSES = "-p"
"""Between an identity and the number of processes, if there are several."""
_PLACES = ("checkpoint-a", "checkpoint-b")
_TENSORS, _RECORD, _SUMS = "tensors.safetensors", "record.json", "SHA256SUMS"

Tensors = Mapping[str, torch.Tensor]


class RunState(msgspec.Struct, forbid_unknown_fields=True):
    """The state of a training run besides its tensors. Position in the data and learning rate follow from the step.

    Attributes:
        over: True if training has ended, at its last step or early by `patience`.
        best: best value of the gate so far; None before the first evaluation.
        waited: evaluations since the best one.
        sums: sums of the loss and its terms since the last evaluation, over `summed` steps.
        history: an entry per evaluation: step, means of loss and terms since the evaluation before, and metrics.
        seconds: seconds of all these steps, including earlier runs, without pauses.
        slowed: seconds on fewer cores because of servers, part of `seconds`.
        paused: seconds of pauses because of servers.
        peak: peak memory of the first process in bytes (`accelerator.peak`), the largest of all runs that resumed.
        processes: steps by the number of processes that took them.
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
    processes: dict[int, int] = {}


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    identity: str
    state: RunState = msgspec.field(name="standing")


class Checkpoints:
    """The checkpoints of one training run, in two folders that alternate, so that at least one is always complete.

    `identity` is a digest of everything the weights depend on. Damaged checkpoints, and checkpoints with another
    identity, are skipped. `note` is called with a line of text for each.
    """

    def __init__(self, folder: Path, identity: str, note: Callable[[str], None]) -> None:
        self._folder, self._identity, self._note = folder, identity, note
        self._next = _PLACES[0]

    def latest(self) -> tuple[RunState, dict[str, torch.Tensor]] | None:
        records: dict[str, RunState] = {}
        for place in filter(lambda place: (self._folder / place).exists(), _PLACES):
            try:
                records[place] = self._read(self._folder / place)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                self._note(f"a checkpoint is skipped: {self._folder / place}: {error}")
        for place in sorted(records, key=lambda place: -records[place].step):
            try:
                tensors = load_file(self._folder / place / _TENSORS)
            except (OSError, SafetensorError) as error:
                self._note(f"a checkpoint is skipped: {self._folder / place}: {error}")
                continue
            self._next = _PLACES[1 - _PLACES.index(place)]
            return records[place], tensors
        return None

    def write(self, state: RunState, tensors: Tensors) -> None:
        """Write a checkpoint in place of the older of the run's two checkpoints, so that a killed run can resume.

        `state` and `tensors` are what `latest` returns. Raise a DependencyError if writing fails; both earlier
        checkpoints then stay.
        """
        try:
            publish(self._folder / self._next, lambda fresh: self._fill(fresh, state, tensors))
        except (OSError, SafetensorError) as error:
            raise DependencyError(
                str(self._folder),
                f"the checkpoint of step {state.step} cannot be written: {error}",
                remedy="make room there and run the same command, which continues from the last checkpoint",
            ) from error
        self._next = _PLACES[1 - _PLACES.index(self._next)]

    def _fill(self, folder: Path, state: RunState, tensors: Tensors) -> None:
        save_file(dict(tensors), folder / _TENSORS)
        record = _Record(self._identity, state)
        (folder / _RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        (folder / _SUMS).write_text(_sums(folder), encoding="ascii")

    def _read(self, folder: Path) -> RunState:
        if (folder / _SUMS).read_text(encoding="ascii") != _sums(folder):
            raise ValueError("its files do not match their SHA-256 sums")
        record = msgspec.json.decode((folder / _RECORD).read_bytes(), type=_Record)
        if record.identity != self._identity:
            raise ValueError("it belongs to a run with other settings, data or shapes")
        return record.state


def copy_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weights.detach().clone() for name, weights in module.state_dict().items()}


def pack(
    module: nn.Module, optimizer: torch.optim.Optimizer, best: Tensors, *, keep: bool = True
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint. If weights are sharded, all processes must call it, one with `keep`."""
    tensors = {f"module.{name}": value for name, value in copy_weights(module).items()}
    tensors |= {f"best.{name}": value for name, value in best.items()}
    for place, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{place}.{key}": value for key, value in values.items()}
    return whole(tensors, keep=keep)


def pack_best(best: Tensors, *, keep: bool = True) -> dict[str, torch.Tensor]:
    return whole({f"best.{name}": value for name, value in best.items()}, keep=keep)


def restore(tensors: Tensors, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Load a checkpoint's tensors into a model and its optimizer, to resume a run; return the best weights so far.

    `tensors` come from `pack` or `pack_best`. From `pack_best`, they have only the best weights: these go into
    `module`, and the optimizer's state is reset.
    """
    begin = "best." if all(name.startswith(("best.", "random.")) for name in tensors) else "module."
    weights = {name.removeprefix(begin): value for name, value in tensors.items() if name.startswith(begin)}
    best = copy_weights(module)
    module.load_state_dict({name: sharded_like(value, best[name]) for name, value in weights.items()})
    for name, value in best.items():
        value.copy_(sharded_like(tensors[f"best.{name}"], value))
    state: dict[int, dict[str, torch.Tensor]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, place, key = name.split(".")
            like = parameters[int(place)]
            # Copy into the memory layout of the parameter, which the file does not store.
            state.setdefault(int(place), {})[key] = (
                torch.empty_like(like).copy_(sharded_like(value, like)) if value.shape == like.shape else value.clone()
            )
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return best


def discard(folder: Path, *, finished: bool = True) -> None:
    """Delete the checkpoints of a training run to free disk space. The run's event files (logged metrics) stay.

    `folder` is the folder of the run. With `finished=False`, keep the checkpoints if the training has ended, since its
    weights may be needed again.
    """
    for place in _PLACES:
        if not finished and _is_over(folder / place):
            continue
        for path in (folder / place, *folder.glob(f".{place}-*")):
            rmtree(path, ignore_errors=True)


def processes_identity(identity: str, count: int) -> str:
    """Return the identity of a student, or of a training, with several processes: they change the last bits."""
    return identity if count == 1 else f"{identity}{_PROCESSES}{count}"


@dataclass(frozen=True)
class Trainings:
    """The run folders of one training, subfolders of `folder`, and the id of the `student` to write from them.

    The id is that of a student from one process, whatever the number of processes, which is in the name of `folder`.
    """

    folder: Path
    student: str

    def begin(self, *, again: bool) -> None:
        if not self.folder.exists():
            self._continue_other()
        if again and self._written.exists():  # otherwise continue an interrupted `again`
            for run in self.folder.glob("*-*"):
                discard(run)
            self._selected.unlink(missing_ok=True)
            self._written.unlink()
        if not self._selected.exists():
            write_atomically(self._selected, self.student.encode())

    def _continue_other(self) -> None:
        """Take over the folder of the same training with another number of processes, if it was interrupted."""
        base = self.folder.name.partition(_PROCESSES)[0]
        for other in self.folder.parent.glob(f"{base}*"):
            if other.name.partition(_PROCESSES)[0] == base and not (other / self._written.name).exists():
                other.rename(self.folder)
                return

    def require_shared(self) -> None:
        if not self._selected.exists():
            raise DependencyError(
                str(self.folder), "the folder that the first process has written is not visible to another process",
                expected="a folder that all processes share",
            )  # fmt: skip

    @property
    def only_reporting_changed(self) -> bool:
        """True if the weights were trained for another student id: only reporting code changed. Call `begin` first."""
        return self._selected.read_text(encoding="utf-8") != self.student

    def end(self) -> None:
        """Record that the student is written; delete all checkpoints in `runs` except this training's final weights."""
        write_atomically(self._written, self.student.encode())
        for run in self.folder.parent.glob("*/*"):
            discard(run, finished=run.parent != self.folder)

    @property
    def _selected(self) -> Path:
        return self.folder / "selected"

    @property
    def _written(self) -> Path:
        return self.folder / "written"


def is_trained(folder: Path) -> bool:
    """Return True if the training run in a folder has ended and its weights are still there."""
    return any(_is_over(folder / place) for place in _PLACES)


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
