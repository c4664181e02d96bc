import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from isthmus.distill.export.acceptance import int8_advice, require_parity
from isthmus.distill.export.candidate import ParityLimits
from isthmus.distill.export.parity import _worst
from isthmus.distill.onnx.quantize import quantize
from isthmus.distill.onnx.runtime import ask, predict, session
from isthmus.distill.restore import create_task
from isthmus.distill.tasks.graph import student_graph
from isthmus.distill.tasks.task import Task
from isthmus.features.errors import ConfigurationError, ParityFailed
from isthmus.package.manifest import read_package
from tests.distill.conftest import SERVING, make_package
from tests.distill.kinds import Reader, Tokens
from tests.distill.support import material, run

CLASSES: dict[str, Any] = {"task": "tests.distill.kinds:Classes"}


def made(table: pa.Table) -> tuple[Task, Any]:
    task = create_task(material(table, **CLASSES))
    return task, task.student().eval().requires_grad_(requires_grad=False)


def test_the_default_tolerance_grows_with_the_outputs(table: pa.Table) -> None:
    task, student = made(table)
    test = task.material.parts.test
    for weights in student.last.parameters():
        weights.mul_(0.1)
    assert ParityLimits.of(task, student, test).limit("int8", "logits") == pytest.approx(0.05, abs=1e-5)
    student.last.weight.mul_(5000)
    values = task.case(student, test[:: max(1, len(test) // 256)]).expected["logits"]
    width = np.subtract(*np.quantile(values, [0.975, 0.025]))
    limits = ParityLimits.of(task, student, test)
    assert width > 10
    assert limits.limit("int8", "logits") == pytest.approx(0.05 * width, rel=0.2)
    assert limits.limit("fp32", "logits") == pytest.approx(1e-5 * width, rel=0.2)
    # What a task declares is absolute, even if the numbers are those of the default.
    task.tolerance = dict(Task.tolerance)
    assert ParityLimits.of(task, student, test).limit("int8", "logits") == 0.05


def test_logits_of_classes_are_compared_as_probabilities(table: pa.Table) -> None:
    task, student = made(table)
    test = task.material.parts.test
    student.last.weight.mul_(50)
    case = task.numbered_case(student, test[:20])
    moved = {"logits": case.expected["logits"] + np.float32(0.9) * np.eye(1, 5, dtype=np.float32)}
    assert ParityLimits.of(task, student, test).compare("fp32", case, moved)[0].by == pytest.approx(0.9, abs=1e-3)
    task.classes = tuple("abcde")
    limits = ParityLimits.of(task, student, test)
    assert limits.limit("int8", "softmax(logits)") == pytest.approx(0.05, abs=1e-5)
    (far,) = limits.compare("int8", case, moved)
    powers = [np.exp(side["logits"].astype(np.float64)) for side in (case.expected, moved)]
    before, after = (power / power.sum(1, keepdims=True) for power in powers)
    assert far.by == pytest.approx(np.abs(after - before).max(), abs=1e-6)
    assert re.search(r"row \d+ of the training set, output softmax\(logits\)\[\d\]", far.place)
    # A number that is added to all logits changes no probability.
    (same,) = limits.compare("fp32", case, {"logits": case.expected["logits"] + 1})
    assert same.share <= 1
    (strange,) = limits.compare("int8", case, {"logits": np.array(1)})
    assert strange.by == np.inf
    # A tolerance that the task declares is about the outputs themselves.
    task.tolerance = {"fp32": 1e-5, "int8": 0.5}
    (raw,) = ParityLimits.of(task, student, test).compare("int8", case, moved)
    assert raw.limit == 0.5
    assert raw.by == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize("mask", [-1e9, -1e4, float(np.finfo(np.float32).min)])
def test_masked_logits_allow_no_other_number_to_differ(table: pa.Table, mask: float) -> None:
    task, student = made(table)
    test, hidden = task.material.parts.test, torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])

    def masked(*inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": torch.where(hidden > 0, torch.tensor(mask), student(*inputs)["logits"])}

    limits = ParityLimits.of(task, masked, test)  # type: ignore[arg-type]
    assert limits.limit("int8", "logits") < 1
    case = task.numbered_case(masked, test[:20])  # type: ignore[arg-type]
    near = np.nextafter(case.expected["logits"], np.float32(0))
    assert limits.compare("fp32", case, {"logits": near})[0].share <= 1
    near[7, 1] += 1
    (far,) = limits.compare("int8", case, {"logits": near})
    assert far.share > 1
    assert far.place.endswith("logits[1]")


@pytest.mark.parametrize("masked", [-np.inf, np.inf, np.nan, -1e9])
def test_the_verdict_sees_what_differs_beside_a_masked_number(masked: float) -> None:
    expected = np.array([[masked, 0.5], [masked, 0.5]], np.float32)
    found = np.array([[masked, 0.5], [masked, 9.5]], np.float32)
    ours, theirs, allowed, _ = _worst({"y": expected}, {"y": found}, {"y": 1e-4})
    assert (ours[1], theirs[1], allowed[1] < 1e-3) == (0.5, 9.5, True)
    np.testing.assert_equal(ours[0], theirs[0])


def test_a_refusal_names_the_number_and_the_line_that_lets_it_pass(table: pa.Table) -> None:
    task, student = made(table)
    test = task.material.parts.test
    case = task.numbered_case(student, test[:20])
    wrong = case.expected["logits"].copy()
    wrong[7, 3] += 0.4
    limits = ParityLimits.of(task, student, test)
    with pytest.raises(ParityFailed) as caught:
        require_parity("model.int8.onnx", limits, "int8", limits.compare("int8", case, {"logits": wrong}))
    error = caught.value
    assert error.where == f"model.int8.onnx: row {test[7]} of the training set, output logits[3]"
    values = [float(text) for text in re.findall(r"answers ([^ ,]+)", error.found)]
    assert values == pytest.approx([wrong[7, 3], case.expected["logits"][7, 3]])
    assert 'the default tolerance["int8"], 0.05, times the scale of the output' in error.expected
    (line,) = re.findall(r"tolerance = (\{.*\}) in class Classes", error.remedy)
    task.tolerance = eval(line)  # noqa: S307 - what a reader of the message writes
    declared = ParityLimits.of(task, student, test)
    require_parity("model.int8.onnx", declared, "int8", declared.compare("int8", case, {"logits": wrong}))
    assert declared.source("int8") == 'tolerance["int8"] of Classes'


@pytest.mark.accept
def test_a_wrong_graph_has_no_file_in_any_precision(table: pa.Table, tmp_path: Path) -> None:
    own: dict[str, Any] = {"task": "tests.distill.kinds:Named", "seeds": 1, "epochs": 1}
    trained, profile = run(tmp_path, table, **own), replace(SERVING, precision="int8")
    exported = make_package(trained.path, table, tmp_path / "passing", profile, **own)
    assert read_package(exported.path).classes == tuple("abcde")
    tasks = pytest.MonkeyPatch()
    tasks.setattr("tests.distill.kinds.Named.tolerance", {"fp32": 1e-4, "int8": 10.0})
    tasks.setattr("isthmus.distill.restore.provenance", lambda _task: trained.data["made_of"])
    with tasks.context(), pytest.raises(ParityFailed, match=r"model\.fp32\.onnx: .*, output logits"):
        make_package(trained.path, table, tmp_path / "refused", profile, **own)
    tasks.undo()
    assert not (tmp_path / "refused").exists()


def embedding(rows: int = 2000, *more: onnx.NodeProto) -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    constants = {"table": draw.normal(size=(rows, 16)), "weights": draw.normal(size=(16, 4))}
    nodes = [helper.make_node("Gather", ["table", "ids"], ["rows"], name="rows"),
             helper.make_node("ReduceMean", ["rows", "axis"], ["mean"], name="mean", keepdims=0),
             helper.make_node("MatMul", ["mean", "weights"], ["y"], name="y")]  # fmt: skip
    graph = helper.make_graph(
        [*nodes, *more], "bag", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", "P"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        [*(numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()),
         numpy_helper.from_array(np.array([1]), "axis")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_an_embedding_table_has_eight_bits(table: pa.Table) -> None:
    model, fed = embedding(), {"ids": np.random.default_rng(1).integers(0, 2000, (64, 5))}
    whole = model.SerializeToString()
    small = quantize(model, [fed], Task.quantized)
    assert len(small) < 0.4 * len(whole)
    apart = np.abs(ask(session(small, 1), fed)["y"] - ask(session(whole, 1), fed)["y"]).max()
    assert 0 < apart < 0.1
    assert len(quantize(model, [fed], ["MatMul"])) > 0.9 * len(whole)
    # A table that another operator reads, too, stays as it is.
    tied = embedding(2000, helper.make_node("ReduceSum", ["table"], ["z"], name="z"))
    tied.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 1]))
    assert len(quantize(tied, [fed], Task.quantized)) > 0.9 * len(whole)
    assert int8_advice({"fp32": small, "int8": whole}, fed, 1).startswith("INT8 is not smaller: ")
    assert int8_advice({"fp32": whole}, fed, 1) == ""


@pytest.mark.accept
@pytest.mark.slowest
@pytest.mark.parametrize("kind", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.accept)])
def test_the_time_axis_of_a_recurrent_student_stays_open(table: pa.Table, kind: type[nn.RNNBase]) -> None:
    task, student = Tokens(material(table, **CLASSES)), Reader(kind)
    task.arguments = 'dynamic_shapes=({0: torch.export.Dim("N"), 1: torch.export.Dim("L", max=6)},)'
    for _ in range(2):  # torch fixed the size from the second export on
        opened = session(student_graph(task, student).SerializeToString(), 1)
        for length in (1, 3, 6):
            fed = {"ids": np.ones((2, length), np.int64)}
            expected = student(torch.from_numpy(fed["ids"])).detach().numpy()
            np.testing.assert_allclose(predict(opened, fed), expected, atol=1e-5)


def refusal(table: pa.Table, arguments: str, kind: type[nn.RNNBase]) -> tuple[Tokens, ConfigurationError]:
    task = Tokens(material(table, **CLASSES))
    task.arguments = arguments
    with pytest.raises(ConfigurationError) as caught:
        student_graph(task, Reader(kind))
    return task, caught.value


def test_a_fixed_size_is_named(table: pa.Table) -> None:
    _, error = refusal(table, "", nn.LSTM)
    assert error.where.endswith("graph of the student")
    assert [(each.where, each.found.partition(", and is fed ")[0]) for each in error.problems] == [
        ("input ids, axis 0", "is fixed at 2"), ("input ids, axis 1", "is fixed at 3")
    ]  # fmt: skip
    wanted = 'dynamic_shapes=({0: torch.export.Dim("N"), 1: torch.export.Dim("L", max=6)},)'
    assert wanted in error.remedy


@pytest.mark.accept
def test_both_remedies_of_a_fixed_size_work(table: pa.Table) -> None:
    task, error = refusal(table, "", nn.LSTM)
    (dynamic,) = re.findall(r"dynamic_shapes=\(.*?\},\)", error.remedy)
    # torch fixes a size in nn.RNN whatever it is told.
    task, error = refusal(table, dynamic, nn.RNN)
    (old,) = re.findall(r"dynamo=False, dynamic_axes=\{.*\}(?= instead)", error.remedy)
    for kind, arguments in ((nn.LSTM, dynamic), (nn.RNN, old)):
        task.arguments = arguments
        opened = session(student_graph(task, Reader(kind)).SerializeToString(), 1)
        assert [predict(opened, {"ids": np.ones((n, n), np.int64)}).shape for n in (1, 4)] == [(1, 5), (4, 5)]


def test_what_onnx_runtime_refuses_is_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match="the student's graph: ONNX Runtime: cannot open a session"):
        session(b"no graph", 1)
    opened = session(embedding().SerializeToString(), 1)
    with pytest.raises(ConfigurationError, match=r"fails on ids float32 \[2, 3\]: .*data type"):
        ask(opened, {"ids": np.zeros((2, 3), np.float32)})
    with pytest.raises(ConfigurationError, match=r"fails on .*\['ids'\]"):
        predict(opened, {})
