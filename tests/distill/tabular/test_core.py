"""The numeric core of a student of tables, which runtimes without texts compute."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from isthmus.distill.distillation import DistillationReport
from isthmus.distill.labels import Isotonic, Temperature
from isthmus.distill.onnx.runtime import ask, session, tensor_info
from isthmus.distill.restore import create_task, restore
from isthmus.distill.runtimes.network import portable_part
from isthmus.distill.tabular.calibration import IsotonicCalibrator, TemperatureCalibrator
from isthmus.distill.tabular.student import Student
from isthmus.package.manifest import TensorInfo
from tests.distill.labelled import labelled, material_of
from tests.distill.support import difference, material


def test_a_core_answers_like_its_graph(table: pa.Table, trained: DistillationReport) -> None:
    rows = material(table)
    task, student = create_task(rows), restore(rows, trained.path).student
    texts, outputs = [TensorInfo("categories", "string", ("N", 2))], [TensorInfo("probability", "float", ("N",))]
    of = portable_part(task, student, rows.parts.train[:1], texts, outputs)
    tensors = TensorInfo("numbers", "float", ("N", 7)), TensorInfo("places", "int32", ("N", 2))
    assert (of.part, of.tensors) == ("core", tensors)
    for case in task.cases(student):
        with torch.inference_mode():
            (answer,) = of.require("core.fp32.pte", "a phone")(*map(torch.from_numpy, case.core.values()))
        assert {name: (tensor.dtype.name, tensor.shape[1]) for name, tensor in case.core.items()} == {
            "numbers": ("float32", 7), "places": ("int32", 2)
        }  # fmt: skip
        assert difference(case.expected, {"probability": answer.numpy()}) <= 1e-6
    fed, again = task.core_feeds(rows.parts.test[:3]), task.case(student, rows.parts.test[:3]).core
    assert all(np.array_equal(fed[name], again[name]) for name in again)


@pytest.mark.parametrize(("kind", "options", "output"), [
    ("binary", {}, ("probability", ("N",))), ("binary", {"calibration": Isotonic()}, ("probability", ("N",))),
    ("binary", {"calibration": Temperature()}, ("probability", ("N",))), ("classes", {}, ("probabilities", ("N", 3))),
    ("classes", {"calibration": Temperature()}, ("probabilities", ("N", 3))), ("number", {}, ("value", ("N",))),
    ("several", {}, ("probabilities", ("N", 3))), ("rank", {}, ("score", ("N",))),
], ids=str)  # fmt: skip
def test_graph_core_and_torch_answer_alike_whatever_the_label(
    kind: str, options: dict[str, Any], output: tuple[str, tuple[int | str, ...]]
) -> None:
    rows = material_of(kind, labelled(kind, 400), **options)
    task: Any = create_task(rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        student: Student = task.student().eval().requires_grad_(requires_grad=False)
    match student.answer.calibration:
        case TemperatureCalibrator() as scaled:
            scaled.inverse.fill_(0.5)
        case IsotonicCalibrator() as risen:
            draw = np.random.default_rng(0)
            risen.learn(draw.normal(size=4000), draw.integers(0, 2, 4000))
    model = task.model(student)
    (described_output,) = map(tensor_info, model.graph.output)
    assert (described_output.name, described_output.shape) == output
    of = portable_part(task, student, rows.parts.train[:1], [*map(tensor_info, model.graph.input)], [described_output])
    opened, tolerance = session(model.SerializeToString(), 1), task.tolerance["fp32"]
    for case in (*task.cases(student), task.case(student, rows.parts.test)):
        assert difference(case.expected, ask(opened, case.feeds)) <= tolerance
        with torch.inference_mode():
            (answer,) = of.require("core.fp32.pte", "a phone")(*map(torch.from_numpy, case.core.values()))
        assert difference(case.expected, {described_output.name: answer.numpy()}) <= tolerance
    replies = task.replies(lambda feeds: ask(opened, feeds), rows.parts.test)
    figures = task.quality(replies, rows.parts.test, {})
    assert figures[task.metric] == pytest.approx(task.score(replies, rows.parts.test, {}))
    key, labels = task.keys[0], task.batch(torch.from_numpy(rows.parts.test)).labels
    scores = torch.from_numpy(replies[key]).float()
    loss, terms = task.objective()({key: scores}, {key: torch.zeros_like(scores)}, labels, 0.5)
    assert np.isfinite(loss.item())
    assert terms.keys() == {"labels", "soft"}
