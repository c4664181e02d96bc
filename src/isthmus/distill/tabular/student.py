"""The student of tables: a small network behind a preparation of raw values."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import nn

from isthmus.distill.tabular.preparation import NUMBERS, Prepare
from isthmus.distill.tabular.tensors import Tensors
from isthmus.distill.types import Array
from isthmus.features.errors import DataError
from isthmus.features.package.manifest import Feeds, Tensor
from isthmus.transforms.preparation.fit import Preparation

RECORD = "student.json"
PLACES = "places"


class Student(nn.Module):
    """An MLP on prepared numbers and embeddings of prepared texts."""

    def __init__(self, prepare: Prepare, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.prepare = prepare
        preparation = prepare.preparation
        self.embeddings = nn.ModuleList(_embedding(*shape) for shape in preparation.embedded.values())
        width = preparation.width + sum(table.embedding_dim for table in self.tables)
        layers: list[nn.Module] = []
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(dropout)]
            width = units
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    @property
    def tables(self) -> list[nn.Embedding]:
        """The embeddings, in the order of their texts."""
        return [table for table in self.embeddings if isinstance(table, nn.Embedding)]

    def forward(self, numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Logits (n,) of prepared rows: numbers, float32 (n, width), and places of texts, int64 (n, k)."""
        return _logits(self.embeddings, self.layers, numbers, places)

    def logits(self, data: Tensors) -> Array:
        """Float32 logits (n,) of raw rows, on the CPU, without dropout."""
        self.eval()
        with torch.inference_mode():
            result: Array = self(*map(torch.from_numpy, self.prepare(data))).numpy()
        return result


class CoreNetwork(nn.Module):
    """A student without its preparation: probabilities, float32 (n,), of its `core_tensors`."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.embeddings, self.layers = student.embeddings, student.layers
        self._names = [tensor.name for tensor in core_tensors(student)]

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Probabilities, of the tensors in their order."""
        fed = dict(zip(self._names, tensors, strict=True))
        return torch.sigmoid(_logits(self.embeddings, self.layers, fed.get(NUMBERS), fed.get(PLACES)))


def core_tensors(student: Student) -> tuple[Tensor, ...]:
    """`numbers`, float32 (N, width), and `places`, int32 (N, k), rows of the k embeddings; each unless it is empty."""
    widths = student.prepare.preparation.width, len(student.embeddings)
    tensors = Tensor(NUMBERS, "float", ("N", widths[0])), Tensor(PLACES, "int32", ("N", widths[1]))
    return tuple(tensor for tensor, width in zip(tensors, widths, strict=True) if width)


def core_feeds(numbers: Array, places: Array) -> Feeds:
    """The values of `core_tensors` for prepared rows."""
    tensors = {NUMBERS: numbers, PLACES: places.astype(np.int32)}
    return {name: tensor for name, tensor in tensors.items() if tensor.shape[1]}


def _logits(
    embeddings: nn.ModuleList, layers: nn.Module, numbers: torch.Tensor | None, places: torch.Tensor | None
) -> torch.Tensor:
    parts = [] if numbers is None else [numbers]
    if places is not None:
        parts += [table(places[:, position]) for position, table in enumerate(embeddings)]
    logits: torch.Tensor = layers(torch.cat(parts, dim=1))[:, 0]
    return logits


def _embedding(count: int, width: int) -> nn.Embedding:
    """Row 0, the unknown category, starts at zero: it stays neutral unless null occurs in training."""
    table = nn.Embedding(count, width)
    with torch.no_grad():
        table.weight[0] = 0.0
    return table


class StudentRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `student.json`: everything about a student but its weights."""

    id: str
    name: str
    contract: str
    training_set: str
    label: str
    inputs: tuple[tuple[str, str], ...]
    split: tuple[float, float, float]
    boundaries: tuple[int, int]
    hidden: tuple[int, ...]
    dropout: float
    preparation: Preparation


def read_record(folder: Path) -> StudentRecord:
    """The record of a trained student."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=StudentRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise unreadable(folder / RECORD, error) from error


def unreadable(file: Path, error: Exception) -> DataError:
    """The error of a file of a trained student that cannot be read."""
    return DataError(str(file), f"cannot be read: {error}", expected="a trained student", remedy="run distill again")
