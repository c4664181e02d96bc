"""Tasks of other kinds: several classes, layers, shared weights, images, losses that look at neighbors."""

import io
import math
import warnings
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss

from isthmus.distill.losses.embeddings import similarities
from isthmus.distill.losses.hidden import HiddenStates
from isthmus.distill.losses.logits import hard_targets, soft_targets, top_k_targets
from isthmus.distill.losses.objective import Objective, Schedule, Term
from isthmus.distill.outputs.form import OutputFormat
from isthmus.distill.tasks.task import Batch, Case, Material, Task
from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.types import Answers, Index
from isthmus.package.inputs import Feeds

CLASSES = 5


class Classifier(nn.Module):
    """Two numbers to five classes; gives its layers, too."""

    def __init__(self, units: int, normed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, units), nn.Linear(units, units)
        self.norm = nn.BatchNorm1d(units) if normed else nn.Identity()
        self.last = nn.Linear(units, CLASSES)

    def forward(self, numbers: Tensor) -> dict[str, Any]:
        first = self.norm(self.first(numbers)).tanh()
        second = self.second(first).tanh()
        return {"logits": self.last(second), "hidden": [first, second], "embedding": second}


class Logits(nn.Module):
    """What a graph gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, numbers: Tensor) -> Tensor:
        given = self.module(numbers)
        result: Tensor = given["logits"] if isinstance(given, dict) else given
        return result


class Classes(Task):
    """Five classes, of a network with layers."""

    metric = "accuracy"
    at_once = 100
    normed = False

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        distance = np.nan_to_num(material.table["distance"].to_numpy(zero_copy_only=False).astype(np.float32)) / 800
        hour = material.table["hour"].to_numpy().astype(np.float32) / 24
        self.numbers = torch.from_numpy(np.stack([distance, hour], 1))
        self.labels = (self.numbers.sum(1) * 2).long().clamp(0, CLASSES - 1)

    def teacher(self) -> Teacher:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return NetworkTeacher(Classifier(32), ["logits", "embedding"], name="classifier")

    def asked(self, rows: Index) -> Any:
        return self.numbers[torch.from_numpy(rows)]

    def student(self) -> nn.Module:
        return Classifier(4, self.normed)

    def batch(self, rows: Tensor) -> Batch:
        return Batch((self.numbers[rows],), self.labels[rows])

    def objective(self) -> Objective:
        return Objective({"labels": self.hard(), "soft": self.soft()})

    def hard(self) -> Term:
        return Term(hard_targets, 0.5, student="student.logits", labels="labels")

    def soft(self) -> Term:
        loss = partial(soft_targets, temperature=2.0)
        return Term(loss, 0.5, student="student.logits", teacher="teacher.logits")

    def quality(self, answers: Answers, rows: Index, _taught: Answers) -> dict[str, float]:
        classes = answers["logits"].argmax(-1) if "logits" in answers else answers["indexes"][:, 0]
        return {"accuracy": float((classes == self.labels[torch.from_numpy(rows)].numpy()).mean())}

    def model(self, student: nn.Module) -> onnx.ModelProto:
        file, example = io.BytesIO(), torch.from_numpy(next(iter(self.feeds(np.arange(1)).values())))
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(Logits(student).eval(), (example,), file, input_names=["x"], output_names=[*self.keys],  # type: ignore[arg-type]
                              dynamic_axes={"x": {0: "N"}, self.keys[0]: {0: "N"}}, dynamo=False)  # fmt: skip
        return onnx.load_from_string(file.getvalue())

    def feeds(self, rows: Index) -> Feeds:
        return {"x": self.numbers[torch.from_numpy(rows)].numpy()}


class Named(Classes):
    """Its classes have names; its graph answers to 1e-3 of the student, and its INT8 file may be far off."""

    classes = tuple("abcde")
    tolerance = MappingProxyType({"fp32": 1e-2, "int8": 10.0})

    def teacher(self) -> Teacher:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return NetworkTeacher(Classifier(32), ["logits", "embedding"], name="classifier", labels=self.classes)

    def model(self, student: nn.Module) -> onnx.ModelProto:
        model = super().model(student)
        bias = next(each for each in model.graph.initializer if list(each.dims) == [CLASSES])
        bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + np.float32(1e-3), bias.name))
        return model


class Reader(nn.Module):
    """Reads tokens one after the other."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(20, 4), nn.Linear(4, CLASSES)
        self.steps = kind(4, 4, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.last(self.steps(self.words(ids))[0].sum(1))
        return result


class Tokens(Classes):
    """Tokens of other lengths from row to row; `arguments` go to torch.onnx.export."""

    max_sizes = MappingProxyType({"L": 6})
    arguments: str = ""

    def feeds(self, rows: Index) -> Feeds:
        length = int(rows.max()) % 5 + 2
        return {"ids": (rows[:, None] + np.arange(length)) % 20}

    def model(self, student: nn.Module) -> onnx.ModelProto:
        file, example = io.BytesIO(), torch.ones((2, 3), dtype=torch.int64)
        given = eval(f"dict({self.arguments})", {"torch": torch})  # noqa: S307 - what a message says to write
        names = {"input_names": ["ids"], "output_names": ["logits"], "external_data": False, "verbose": False}
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(student.eval(), (example,), file, **{**names, **given})  # type: ignore[arg-type]
        return onnx.load_from_string(file.getvalue())


class Largest(Classes):
    """Of its teacher the three largest probabilities are kept."""

    form = OutputFormat(top_k=3, temperature=2.0)

    def soft(self) -> Term:
        loss = partial(top_k_targets, temperature=2.0)
        return Term(loss, student="student.logits", probabilities="teacher.probabilities", indexes="teacher.indexes")


class Normed(Classes):
    """Its student has a batch norm, which takes no single row."""

    normed = True


class Neighbors(Classes):
    """Learns how the embeddings of a batch lie to each other."""

    def soft(self) -> Term:
        return Term(partial(similarities, temperature=0.05), student="student.embedding", teacher="teacher.embedding")


class Projected(Classes):
    """Learns a layer of the teacher, through a projection."""

    weight: float | Schedule = 1.0

    def soft(self) -> Term:
        loss = HiddenStates({1: 0}, student_widths=[4, 4], teacher_widths=[32])
        return Term(loss, self.weight, student="student.hidden", teacher="teacher.states")

    def teacher(self) -> Teacher:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return NetworkTeacher(Stacked(), ["logits", "states"], name="stacked")


class Stacked(nn.Module):
    """Gives its layers as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier(32)

    def forward(self, numbers: Tensor) -> dict[str, Tensor]:
        given = self.inner(numbers)
        return {"logits": given["logits"], "states": torch.stack(given["hidden"][1:], 1)}


class Later(Projected):
    """The same, not from the first step on."""

    weight = Schedule(0.0, 1.0)


class Relieved(Classes):
    """The labels take the teacher's place little by little: at first there is nothing for the control to learn."""

    def hard(self) -> Term:
        return Term(hard_targets, Schedule(0.0, 1.0), student="student.logits", labels="labels")


class Unknown(Classes):
    """One of its measures says nothing of these rows."""

    def quality(self, answers: Answers, rows: Index, taught: Answers) -> dict[str, float]:
        return {**super().quality(answers, rows, taught), "rare": math.nan}


class Infinite(Classes):
    """A row of the test part has an input that is no number."""

    def batch(self, rows: Tensor) -> Batch:
        numbers = self.numbers[rows]
        numbers[rows == int(self.material.parts.test[3])] = torch.nan
        return Batch((numbers,), self.labels[rows])


class Twice(nn.Module):
    """Has one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(2, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.third.weight = self.second.weight

    def forward(self, numbers: Tensor) -> Tensor:
        result: Tensor = self.third(self.second(self.first(numbers)).tanh())
        return result


class Shared(Classes):
    """Its student has one weight in two places, and is made of numbers that were read somewhere."""

    def student(self) -> nn.Module:
        student = Twice()
        with torch.no_grad():
            student.first.bias.fill_(float(student.first.weight.abs().max()))
        return student


class Pair(nn.Module):
    """Gives more than anybody asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Twice()

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(numbers), numbers


class Nameless(Classes):
    """Its student gives two outputs, and it names one."""

    def student(self) -> nn.Module:
        return Pair()


class Convolved(nn.Module):
    """An image to an image; its weights lie channels last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first, last = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        for layer in (first, last):
            layer.weight = nn.Parameter(layer.weight.detach().contiguous(memory_format=torch.channels_last))
        self.layers = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), last)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.layers(images)
        return result


class Images(Classes):
    """Learns the images of a teacher, in decibels of its own: of the teacher there are infinitely many."""

    metric = "psnr"
    keys = ("image",)

    def images(self, rows: Tensor) -> Tensor:
        shades = torch.linspace(0, 1, 64).view(8, 8)
        return self.numbers[rows].sum(1)[:, None, None, None] * shades

    def teacher(self) -> Teacher:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return NetworkTeacher(Convolved(16), ["image"], name="convolved")

    def asked(self, rows: Index) -> Any:
        return self.images(torch.from_numpy(rows))

    def student(self) -> nn.Module:
        return Convolved(3)

    def batch(self, rows: Tensor) -> Batch:
        images = self.images(rows)
        return Batch((images,), images.flip(3))

    def objective(self) -> Objective:
        return Objective({
            "labels": Term(l1_loss, 0.1, input="student.image", target="labels"),
            "l1": Term(l1_loss, input="student.image", target="teacher.image"),
        })  # fmt: skip

    def quality(self, answers: Answers, _rows: Index, taught: Answers) -> dict[str, float]:
        error = float(np.square(answers["image"] - taught["image"]).mean())
        return {"psnr": -10 * math.log10(error) if error else math.inf}

    def feeds(self, rows: Index) -> Feeds:
        return {"x": self.images(torch.from_numpy(rows)).numpy()}


class Dark(Images):
    """Of dark images none has a direction."""

    def images(self, rows: Tensor) -> Tensor:
        return super().images(rows) * 0

    def teacher(self) -> Teacher:
        return NetworkTeacher(Black(), ["image"], name="black")

    def quality(self, answers: Answers, _rows: Index, taught: Answers) -> dict[str, float]:
        return {"psnr": -float(np.square(answers["image"] - taught["image"]).mean())}


class Black(nn.Module):
    """What it sees, times nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def forward(self, images: Tensor) -> Tensor:
        return images * self.weight[0]


class Coarse(Classes):
    """Asks of INT8 what it cannot give."""

    tolerance = MappingProxyType({"fp32": 1e-5, "int8": 1e-12})


class Widened(nn.Module):
    """A layer reads an input that is much larger than all others, with a weight of zero."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, units), nn.Linear(units + 1, units)
        self.last = nn.Linear(units, CLASSES)
        self.mask: Tensor
        self.register_buffer("mask", torch.cat([torch.ones(units), torch.zeros(1)]))

    def forward(self, numbers: Tensor) -> dict[str, Any]:
        first = self.first(numbers).tanh()
        wide = torch.cat([first, 1e4 * numbers[:, :1]], 1)
        second = nn.functional.linear(wide, self.second.weight * self.mask, self.second.bias).tanh()
        return {"logits": self.last(second), "hidden": [first, second], "embedding": second}


class Outliers(Classes):
    """Static INT8 rounds all inputs of a layer to the step of the largest; 8-bit weights are close enough."""

    tolerance = MappingProxyType({"fp32": 1e-5, "int8": 0.02})

    def student(self) -> nn.Module:
        return Widened(90)

    def teacher(self) -> Teacher:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return NetworkTeacher(Classifier(96), ["logits", "embedding"], name="classifier")


class Compressed(Outliers):
    """Files with smaller weights are always made."""

    tolerance = MappingProxyType({"fp32": 1e-5, "int8": 0.02, "w8": 0.02, "fp16": 0.005})


class Mixed(Outliers):
    """Any file in mixed precision is close enough."""

    tolerance = MappingProxyType({"fp32": 1e-5, "int8": 0.02, "mixed": 2})


class Edged(Classes):
    """A device may be fed no rows at all."""

    def edges(self, student: nn.Module) -> Sequence[Case]:
        return (self.case(student, np.arange(0)),)
