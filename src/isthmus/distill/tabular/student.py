"""The tabular student: a small network, and the preparation of raw values before it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import nn

from isthmus.distill.tabular.answers import Probability, StudentOutput
from isthmus.distill.tabular.preparation import NUMBERS, Prepare
from isthmus.distill.tabular.tensors import TabularTensors
from isthmus.distill.types import Array
from isthmus.features.errors import DataError
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import TensorInfo
from isthmus.transforms.preparation.fit import LEARNED, Preparation

RECORD = "student.json"
PLACES = "places"

_Content = TypeVar("_Content")


class Student(nn.Module):
    """A small network (MLP) on prepared numbers and embeddings of prepared texts; `answer` is its output layer."""

    def __init__(
        self, prepare: Prepare, hidden: Sequence[int], dropout: float, answer: StudentOutput | None = None
    ) -> None:
        super().__init__()
        self.prepare = prepare
        self.answer = answer or Probability()
        preparation = prepare.preparation
        self.embeddings = nn.ModuleList(_embedding(*shape) for shape in preparation.embedded.values())
        width = preparation.width + sum(table.embedding_dim for table in self.tables)
        layers: list[nn.Module] = []
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(dropout)]
            width = units
        self.layers = nn.Sequential(*layers, nn.Linear(width, self.answer.width))

    @property
    def tables(self) -> list[nn.Embedding]:
        return [table for table in self.embeddings if isinstance(table, nn.Embedding)]

    def last(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the last linear layer, (n, `answer.width`)."""
        numbers, places = inputs
        return _last(self.embeddings, self.layers, numbers, places)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Compute scores from prepared rows: uncalibrated in training mode, calibrated or clipped in eval mode.

        The inputs are numbers, float32 (n, width), and places, int64 (n, texts): the row to look up in each embedding
        table. In eval mode, a student with a calibration returns a dict with calibrated `logits` and `uncalibrated`
        logits.
        """
        return self.answer.outputs(self.last(*inputs))

    def logits(self, data: TabularTensors) -> Array:
        self.eval()
        with torch.inference_mode():
            scores = self(*map(torch.from_numpy, self.prepare(data)))
        result: Array = (scores["logits"] if isinstance(scores, dict) else scores).numpy()
        return result


class CoreNetwork(nn.Module):
    """A student's network without the preparation: maps the tensors of `core_tensors`, in order, to the output."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.embeddings, self.layers, self.answer = student.embeddings, student.layers, student.answer
        self._names = [tensor.name for tensor in core_tensors(student)]

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        fed = dict(zip(self._names, tensors, strict=True))
        last = _last(self.embeddings, self.layers, fed.get(NUMBERS), fed.get(PLACES))
        answer: torch.Tensor = self.answer(self.answer.scores(last))
        return answer


def core_tensors(student: Student) -> tuple[TensorInfo, ...]:
    widths = student.prepare.preparation.width, len(student.embeddings)
    tensors = TensorInfo(NUMBERS, "float", ("N", widths[0])), TensorInfo(PLACES, "int32", ("N", widths[1]))
    return tuple(tensor for tensor, width in zip(tensors, widths, strict=True) if width)


def core_feeds(numbers: Array, places: Array) -> Feeds:
    tensors = {NUMBERS: numbers, PLACES: places.astype(np.int32)}
    return {name: tensor for name, tensor in tensors.items() if tensor.shape[1]}


def _last(
    embeddings: nn.ModuleList, layers: nn.Module, numbers: torch.Tensor | None, places: torch.Tensor | None
) -> torch.Tensor:
    parts = [] if numbers is None else [numbers]
    if places is not None:
        parts += [table(places[:, position]) for position, table in enumerate(embeddings)]
    last: torch.Tensor = layers(torch.cat(parts, dim=1))
    return last


def _embedding(count: int, width: int) -> nn.Embedding:
    """Create an embedding whose row 0, the unknown category, is zero and stays zero unless training has such rows."""
    table = nn.Embedding(count, width)
    with torch.no_grad():
        table.weight[0] = 0.0
    return table


class StudentRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of `student.json`: a student without its weights. `boundaries` are in microseconds since 1970 UTC."""

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
    answer: str = Probability.name
    classes: tuple[str, ...] = ()


def read_record(folder: Path) -> StudentRecord:
    return _read(folder / RECORD, StudentRecord)


def read_preparation(folder: Path) -> Preparation:
    return _read(folder / LEARNED, Preparation)


def _read(file: Path, kind: type[_Content]) -> _Content:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: Exception) -> DataError:
    return DataError(str(file), f"cannot be read: {error}", expected="a trained student", remedy="run distill again")
