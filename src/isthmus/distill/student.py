"""The student: a small network that takes raw values, with its preprocessing inside."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from isthmus.distill.dataset import Array, Preprocessing, Tensors
from isthmus.features.errors import DataError
from isthmus.features.manifest import ModelInput
from isthmus.features.types import TYPES

CLIP = 4.0
"""Standardized numbers are held within ±CLIP, so that a wild value cannot drown the others."""
RECORD = "student.json"


class Student(nn.Module):
    """An MLP on standardized numbers, missing indicators and category embeddings.

    Attributes:
        preprocessing: what the training part taught about the raw inputs.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    indicators: torch.Tensor

    def __init__(self, preprocessing: Preprocessing, hidden: Sequence[int], dropout: float, seed: int = 0) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        self.register_buffer("mean", torch.tensor(preprocessing.mean, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(preprocessing.scale, dtype=torch.float32))
        self.register_buffer("indicators", torch.tensor(preprocessing.indicators, dtype=torch.int64))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embeddings = nn.ModuleList(_embedding(len(words) + 1) for words in preprocessing.vocabularies)
            width = len(preprocessing.mean) + len(preprocessing.indicators)
            width += sum(table.embedding_dim for table in self.tables)
            layers: list[nn.Module] = []
            for units in hidden:
                layers += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(dropout)]
                width = units
            self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    @property
    def tables(self) -> list[nn.Embedding]:
        """The embedding of each category, in order."""
        return [table for table in self.embeddings if isinstance(table, nn.Embedding)]

    def forward(self, numeric: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Logits (n,) of raw numbers, float32 (n, numbers) with NaN for null, and category indexes, int64 (n, k)."""
        missing = torch.isnan(numeric)
        standard = ((numeric - self.mean) / self.scale).clamp(-CLIP, CLIP)
        parts = [torch.where(missing, 0.0, standard), missing[:, self.indicators].float()]
        parts += [table(categories[:, position]) for position, table in enumerate(self.embeddings)]
        logits: torch.Tensor = self.layers(torch.cat(parts, dim=1))[:, 0]
        return logits

    def logits(self, data: Tensors) -> Array:
        """Float32 logits (n,) of raw rows, on the CPU and without dropout."""
        self.eval()
        with torch.inference_mode():
            index = torch.from_numpy(self.preprocessing.index(data.categories))
            result: Array = self(torch.from_numpy(data.numeric), index).numpy()
        return result

    @property
    def size(self) -> int:
        """Trained parameters."""
        return sum(weights.numel() for weights in self.parameters())


def _embedding(count: int) -> nn.Embedding:
    """Row 0, the unknown category, begins at zero: unless null occurs in training it stays neutral."""
    table = nn.Embedding(count, min(12, (count + 1) // 2))
    with torch.no_grad():
        table.weight[0] = 0.0
    return table


class StudentRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `student.json` holds: everything about a student but its weights."""

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
    preprocessing: Preprocessing

    @property
    def model_inputs(self) -> tuple[ModelInput, ...]:
        """The inputs in order."""
        return tuple(ModelInput(name, TYPES[dtype]) for name, dtype in self.inputs)


def read_record(folder: Path) -> StudentRecord:
    """The record of a trained student."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=StudentRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise _unreadable(folder / RECORD, error) from error


def load_student(folder: Path, weights: str = "student") -> Student:
    """A trained student, ready to answer; `weights="control"` gives the one that learned from labels alone."""
    record = read_record(folder)
    student = Student(record.preprocessing, record.hidden, record.dropout)
    file = folder / f"{weights}.safetensors"
    try:
        student.load_state_dict(load_file(file))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _unreadable(file, error) from error
    return student.eval()


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(str(file), f"cannot be read: {error}", expected="a trained student", remedy="run distill again")
