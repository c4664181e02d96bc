"""A task of one's own: a small network learns a number, with what a larger one says of it."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from isthmus.distill.losses.hidden import HiddenStates
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.tasks.task import Batch, Material, Task
from isthmus.distill.teachers.function import FunctionTeacher
from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.types import Answers, Index
from isthmus.package.inputs import Feeds


class Line(nn.Module):
    """Answers with what its objective calls `value`."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, units), nn.Tanh(), nn.Dropout(0.1), nn.Linear(units, 1))

    def forward(self, numbers: Tensor) -> dict[str, Tensor]:
        return {"value": self.layers(numbers)[:, 0]}


class Lines(Task):
    """`secret` from `distance` and `hour`."""

    metric = "error"
    more = False
    keys: Sequence[str] = ("value",)
    at_once = 100
    measured = ("halved",)
    units = 3

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        table = material.table
        distance = np.nan_to_num(table["distance"].to_numpy(zero_copy_only=False).astype(np.float32)) / 800
        hour = table["hour"].to_numpy().astype(np.float32) / 24
        self.numbers = torch.from_numpy(np.stack([distance, hour], 1))
        self.wanted = self.numbers.sum(1).sin()

    def teacher(self) -> Teacher:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return NetworkTeacher(Line(64).requires_grad_(False).eval(), ["value"], name="line")

    def asked(self, rows: Index) -> Any:
        return self.numbers[torch.from_numpy(rows)]

    def student(self) -> nn.Module:
        return Line(self.units)

    def batch(self, rows: Tensor) -> Batch:
        return Batch((self.numbers[rows],), self.wanted[rows])

    def objective(self) -> Objective:
        return Objective({
            "labels": Term(mse_loss, 0.9, input="student.value", target="labels"),
            "teacher": Term(partial(mse_loss, reduction="mean"), 0.1, input="student.value", target="teacher.value"),
        })  # fmt: skip

    def quality(self, answers: Answers, rows: Index, taught: Answers) -> dict[str, float]:
        found, theirs = answers["value"].astype(np.float64), taught["value"]
        wanted = self.wanted[torch.from_numpy(rows)].numpy()
        return {"error": float(np.square(found - wanted).mean()), "from_teacher": float(np.abs(found - theirs).mean())}

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:
        return {"difference": float(np.abs(student["value"] - teacher["value"]).mean())}

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        return {"halved": quality["control"]["error"] / quality["student"]["error"]}

    def model(self, student: nn.Module) -> onnx.ModelProto:
        weights = {name.split(".", 1)[1]: tensor.numpy() for name, tensor in student.state_dict().items()}
        nodes = [
            helper.make_node("Gemm", ["numbers", "0.weight", "0.bias"], ["a"], transB=1),
            helper.make_node("Tanh", ["a"], ["b"]),
            helper.make_node("Gemm", ["b", "3.weight", "3.bias"], ["value"], transB=1),
        ]
        graph = helper.make_graph(
            nodes,
            "line",
            [helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["N", 2])],
            [helper.make_tensor_value_info("value", TensorProto.FLOAT, ["N", 1])],
            [numpy_helper.from_array(array, name) for name, array in weights.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    def feeds(self, rows: Index) -> Feeds:
        return {"numbers": self.numbers[torch.from_numpy(rows)].numpy()}


class Obedient(Lines):
    """Learns from the teacher only."""

    def objective(self) -> Objective:
        return Objective({"teacher": Term(mse_loss, input="student.value", target="teacher.value")})


class Large(Lines):
    """Its student is larger than the teacher."""

    units = 65


class Equal(Lines):
    """Its student has the teacher's size."""

    units = 64


class Half(Equal):
    """So it has beside a teacher in half precision, of half the bytes."""

    def teacher(self) -> Teacher:
        network = Line(64).to(torch.bfloat16)
        return NetworkTeacher(network, ["value"], name="half", version="1")

    def asked(self, rows: Index) -> Any:
        return super().asked(rows).to(torch.bfloat16)


class Dropping(Lines):
    """Its student drops units in eval mode, too."""

    def student(self) -> nn.Module:
        return _Answering(lambda values: nn.functional.dropout(values, 0.3))


class Masking(Lines):
    """So does this one, beside the numbers of a mask."""

    def student(self) -> nn.Module:
        def masked(values: Tensor) -> Tensor:
            hidden = torch.arange(len(values)) % 3 == 0
            return nn.functional.dropout(values, 0.3).masked_fill(hidden & (values < values.median()), -1e9)

        return _Answering(masked)


class Crowded(Lines):
    """Its student measures the batch in eval mode, too."""

    def student(self) -> nn.Module:
        return _Answering(lambda values: nn.functional.batch_norm(values[:, None], None, None, training=True)[:, 0])


class Queued(Lines):
    """Its student adds up the rows before."""

    def student(self) -> nn.Module:
        return _Answering(lambda values: values.cumsum(0))


class _Answering(Line):
    def __init__(self, changed: Callable[[Tensor], Tensor]) -> None:
        super().__init__(3)
        self.changed = changed

    def forward(self, numbers: Tensor) -> dict[str, Tensor]:
        return {"value": self.changed(super().forward(numbers)["value"] + numbers[:, 0])}


class Nameless(Lines):
    """Its teacher says names."""

    def teacher(self) -> Teacher:
        return FunctionTeacher(lambda numbers: np.array(["long"] * len(numbers)), ["value"], name="nameless")


CALLS: list[int] = []
REMOTE = {"fails_at": -1}


class Remote(Lines):
    """Its teacher is paid by the call."""

    def teacher(self) -> Teacher:
        def ask(numbers: Tensor) -> Tensor:
            if len(CALLS) == REMOTE["fails_at"]:
                raise ConnectionError("429 Too Many Requests")
            CALLS.append(len(numbers))
            return numbers.sum(1)

        return _Served(ask, ["value"], version="1", name="remote")


class _Served(FunctionTeacher):
    def _identity(self) -> Any:
        return ["served"]


class Bare(Lines):
    """Its teacher is the module itself."""

    def teacher(self) -> Teacher:
        return Line(64)  # type: ignore[return-value]  # what people try first


class Wrong(Lines):
    """Its objective asks for what nobody gives."""

    def objective(self) -> Objective:
        return Objective({
            "labels": Term(mse_loss, input="student.logits", target="labels"),
            "teacher": Term(mse_loss, input="student.value", target="teacher.hidden"),
        })  # fmt: skip


def _taught(term: Term) -> Objective:
    """With something for the control."""
    return Objective({"labels": Term(mse_loss, input="student.value", target="labels"), "taught": term})


class Deep(Lines):
    """Maps to a layer that its teacher does not have."""

    keys: Sequence[str] = ("value", "hidden")

    def teacher(self) -> Teacher:
        def said(numbers: Tensor) -> dict[str, Tensor]:
            return {"value": numbers[:, 0], "hidden": torch.stack([numbers, numbers], 1)}

        return FunctionTeacher(said, ["value", "hidden"], name="deep")

    def student(self) -> nn.Module:
        return Stacked(self.units)

    def objective(self) -> Objective:
        term = HiddenStates({0: 3}, student_widths=[self.units], teacher_widths=[2] * 4)
        return _taught(Term(term, student="student.hidden", teacher="teacher.hidden"))


class Stacked(Line):
    """Gives its one layer, too."""

    def forward(self, numbers: Tensor) -> dict[str, Any]:
        return {**super().forward(numbers), "hidden": [self.layers[0](numbers)[:, None]]}


class Misfit(Lines):
    """The weights of a loss are not as many as its classes."""

    def objective(self) -> Objective:
        def weighed(ours: Tensor, theirs: Tensor) -> Tensor:
            return (torch.ones(5) * (ours - theirs)[:, None] @ torch.ones(3)).mean()

        return _taught(Term(weighed, ours="student.value", theirs="teacher.value"))


class Sorted(Lines):
    """Three classes, of which its teacher has another order; one function, as a student's tokenizer, has other ids."""

    keys: Sequence[str] = ("logits",)
    classes = ("short", "middling", "long")
    theirs: Sequence[str] | None = ("long", "short", "middling")
    words = "bytes"

    def teacher(self) -> Teacher:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return NetworkTeacher(nn.Linear(2, 3), name="sorted", labels=self.theirs)

    def tokenizers(self) -> tuple[Any, Any]:
        return str.encode, str.encode if self.words == "bytes" else lambda text: text.lower().encode()

    def student(self) -> nn.Module:
        return nn.Linear(2, 3, bias=False)

    def objective(self) -> Objective:
        return Objective({
            "labels": Term(mse_loss, input="student.logits", target="labels"),
            "teacher": Term(mse_loss, input="student.logits", target="teacher.logits"),
        })  # fmt: skip

    def batch(self, rows: Tensor) -> Batch:
        inputs, labels = super().batch(rows)
        assert labels is not None
        return Batch(inputs, labels[:, None].expand(-1, 3))

    def model(self, student: nn.Module) -> onnx.ModelProto:
        graph = helper.make_graph(
            [helper.make_node("Gemm", ["numbers", "weight"], ["logits"], transB=1)],
            "sorted",
            [helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["N", 2])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])],
            [numpy_helper.from_array(student.state_dict()["weight"].numpy(), "weight")],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


class Renamed(Sorted):
    """Its teacher has other classes."""

    theirs = ("long", "short", "fair")


class Unnamed(Sorted):
    """Nobody has said what its teacher's classes are."""

    theirs = None


class Reworded(Sorted):
    """Its student reads small letters only."""

    words = "small"


class Drawing(Lines):
    """Its teacher answers by chance."""

    def teacher(self) -> Teacher:
        return FunctionTeacher(lambda numbers: torch.rand(len(numbers)), ["value"], name="drawing")


class Stiff(Lines):
    """A loss without a gradient."""

    def objective(self) -> Objective:
        return Objective({
            "labels": Term(lambda ours, theirs: (ours.detach() - theirs).square().mean(),
                           ours="student.value", theirs="labels"),
        })  # fmt: skip


class Shaped(Lines):
    """Its student may have other sizes; one of them learns from what is no number, and two cannot be built."""

    shape = MappingProxyType({"units": 3, "layers": (1,)})
    tolerance = MappingProxyType({"fp32": 1e-5, "int8": 0.5})

    def model(self, student: nn.Module) -> onnx.ModelProto:
        found = super().model(student)
        for number, node in enumerate(found.graph.node):
            node.name = f"node_{number}"  # what has no name is not quantized
        return found

    def student(self) -> nn.Module:
        if self.shape["units"] == BROKEN:
            raise RuntimeError("no such student")
        if self.shape["units"] == FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights")
        return Line(self.shape["units"])

    def batch(self, rows: Tensor) -> Batch:
        inputs, labels = super().batch(rows)
        assert labels is not None
        return Batch(inputs, labels * torch.nan if self.shape["units"] == SICK else labels)

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        return {"value": super().expected(student, feeds)["value"][:, None]}

    def replies(self, run: Callable[[Feeds], Answers], rows: Index) -> Answers:
        return {"value": run(self.feeds(rows))["value"][:, 0]}


class Exact(Shaped):
    """Loses too much in whole numbers."""

    tolerance = MappingProxyType({"fp32": 1e-5})


class Silent(Shaped):
    """Says nothing of what its graph gives."""

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        return {"other": super().expected(student, feeds)["value"]}


SICK, BROKEN, FULL = 13, 14, 15


class Broken(Lines):
    """A label of its is no number."""

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self.wanted[int(material.parts.train[3])] = torch.nan


class BrokenLater(Lines):
    """So is one that is not of the first batch."""

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self.wanted[int(material.parts.train[-3])] = torch.nan


NOTHING = 3
