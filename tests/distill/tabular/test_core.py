"""The numeric core of a student of tables, which runtimes without texts compute."""

import numpy as np
import pyarrow as pa
import torch

from isthmus.distill.distillation import DistillationReport
from isthmus.distill.export.candidate import difference
from isthmus.distill.portable.network import portable
from isthmus.distill.restore import create_task, restored
from isthmus.features.package.manifest import Tensor
from tests.distill.support import material


def test_a_core_answers_like_its_graph(table: pa.Table, trained: DistillationReport) -> None:
    rows = material(table)
    task, student = create_task(rows), restored(rows, trained.path).student
    texts, outputs = [Tensor("categories", "string", ("N", 2))], [Tensor("probability", "float", ("N",))]
    of = portable(task, student, rows.parts.train[:1], texts, outputs)
    tensors = Tensor("numbers", "float", ("N", 7)), Tensor("places", "int32", ("N", 2))
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
