"""The student of tables: a small network behind a preparation of raw values."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn

from isthmus.distill.tabular.preparation import Prepare
from isthmus.distill.tabular.tensors import Tensors
from isthmus.distill.types import Array
from isthmus.features.errors import DataError
from isthmus.transforms.preparation.fit import Preparation

RECORD = "student.json"


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
        parts = [numbers, *(table(places[:, position]) for position, table in enumerate(self.embeddings))]
        logits: torch.Tensor = self.layers(torch.cat(parts, dim=1))[:, 0]
        return logits

    def logits(self, data: Tensors) -> Array:
        """Float32 logits (n,) of raw rows, on the CPU, without dropout."""
        self.eval()
        with torch.inference_mode():
            result: Array = self(*map(torch.from_numpy, self.prepare(data))).numpy()
        return result


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
