"""Packages for ExecuTorch, LiteRT and Core ML: the numeric core of a table, networks whole, and what is left out."""

import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows
from torch import Tensor, nn

from isthmus.distill.distillation import DistillationReport, distill
from isthmus.distill.export.export import ExportReport, export
from isthmus.distill.onnx.runtime import tensor_info
from isthmus.distill.preflight import rehearse
from isthmus.distill.restore import create_task, restore
from isthmus.distill.runtimes.conversions import CONVERSIONS
from isthmus.distill.runtimes.exportedprogram import conversions
from isthmus.distill.runtimes.litert.process import LIBRARIES as LITERT
from isthmus.distill.runtimes.litert.process import LiteRTProgram
from isthmus.distill.runtimes.network import Converted, Portable, portable_part, run_program
from isthmus.distill.tasks.graph import student_graph
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.task import Material
from isthmus.distill.training.teacheroutputs import open_outputs
from isthmus.features.contract.schema import Column, TransformContract, request_column
from isthmus.features.errors import ConfigurationError, GateFailed
from isthmus.features.types import Float32, Float64
from isthmus.orchestration.runtimes.programs import ProgramRuntime
from isthmus.package.clients import READERS
from isthmus.package.featurizer.form import HEAD
from isthmus.package.golden import read_golden
from isthmus.package.inputs import ModelInput
from isthmus.package.inspect import OnnxRuntime, inspect
from isthmus.package.manifest import TensorInfo as Described
from isthmus.package.manifest import open_package, read_package
from isthmus.transforms.rowwise.compiler import compile_columns
from isthmus.transforms.rowwise.core.expressions import traced
from isthmus.transforms.rowwise.core.types import FLOAT
from tests.distill import kinds
from tests.distill.conftest import SERVING
from tests.distill.labelled import labelled, material_of
from tests.distill.packages import contract, resum
from tests.distill.support import PROFILE, STUDENT, check_package, material, run, training_set
from tests.orchestration.models.test_packages import verify

pytestmark = pytest.mark.timeout(900)

RUNTIMES = ("onnxruntime", *CONVERSIONS)
ROWS = 600
CONTRACT = contract()
TABLE: dict[str, Any] = {"contract": CONTRACT.hash, "seeds": 1, "epochs": 1}
NETWORK = {**TABLE, "task": "tests.distill.kinds:Classes"}
FILES = {"core.fp32.pte", "core.int8.pte", "core.fp32.tflite", "core.fp32.mlpackage.zip"}
NUMBERS, PLACES = Described("numbers", "float", ("N", 7)), Described("places", "int32", ("N", 2))


@pytest.fixture(scope="module")
def installed() -> None:
    """`make accept` installs them: together they take more than half of the time of `make test`."""
    if problems := [problem for each in CONVERSIONS.values() for problem in each.program.libraries.problems()]:
        commands = " and ".join(each.program.libraries.install for each in CONVERSIONS.values())
        pytest.skip(f"{problems[0].found}: run {commands}")


def packaged(model: Path, packages: Path, **changes: Any) -> ExportReport:
    return export(
        material(training_set(ROWS), **changes), model, packages, contract=json.loads(CONTRACT.dumps()),
        profile=replace(SERVING, precision="fp32"), cache=model.parents[1] / "cache",
    )  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> DistillationReport:
    return run(tmp_path_factory.mktemp("table"), training_set(ROWS), **TABLE)


@pytest.fixture(scope="module")
def of_table(installed: None, table: DistillationReport, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    return packaged(table.path, tmp_path_factory.mktemp("packages"), **TABLE, runtimes=RUNTIMES)


@pytest.fixture(scope="module")
def of_network(installed: None, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    notes: list[str] = []
    folder, asked = tmp_path_factory.mktemp("network"), {**NETWORK, "runtimes": RUNTIMES}
    trained = run(folder, training_set(ROWS), notes=notes, **asked)
    assert not [note for note in notes if "no model for" in note]
    return packaged(trained.path, folder / "packages", **asked)


class Wordy(kinds.Classes):
    """Nothing of torch does what its graph does."""

    def network(self, _student: nn.Module) -> None:
        return None


def test_a_graph_without_a_module_is_named_for_each_runtime() -> None:
    rows = material(training_set(ROWS), **NETWORK)
    task, train = Wordy(rows), rows.parts.train
    inputs, outputs = [Described("words", "string", ("N", 2))], [Described("logits", "float", ("N", 5))]
    of = portable_part(task, task.student(), train[:1], inputs, outputs)
    for runtime, files in CONVERSIONS.values():
        for file, convert in files(of, train, ("w8",)).items():
            words = f"{file}: {runtime.libraries.name} has no operators for the start of the graph: its inputs in"
            with pytest.raises(GateFailed, match=re.escape(words)):
                convert()


def test_a_missing_library_is_said_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = cast(dict[str, str], LITERT.pins)
    monkeypatch.setitem(pins, "nothing-such", "7")
    words = r"(?s)LiteRT needs nothing-such, which is not installed; expected 7.*Run pip install --no-deps absl-py==.*"
    with pytest.raises(ConfigurationError, match=words + r'nothing-such==7, or leave "litert" out of the runtimes'):
        run(tmp_path, training_set(ROWS), **TABLE, runtimes=("onnxruntime", "litert"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.accept
@pytest.mark.slowest
@pytest.mark.parametrize(("kind", "output"), [("classes", "probabilities"), ("number", "value"), ("rank", "score")])
def test_a_label_of_each_kind_has_a_core_for_each_runtime(
    installed: None, kind: str, output: str, tmp_path: Path
) -> None:
    rows = material_of(kind, labelled(kind, ROWS), **TABLE, gates=[])
    folders = {name: tmp_path / name for name in ("models", "cache", "runs")}
    trained = distill(rows, folder=folders["models"], cache=folders["cache"], runs=folders["runs"])
    task, student, some = create_task(rows), restore(rows, trained.path).student, rows.parts.test[:50]
    graph = student_graph(task, student).graph
    tensors, outputs = ([*map(tensor_info, values)] for values in (graph.input, graph.output))
    of, expected = portable_part(task, student, some[:1], tensors, outputs), task.case(student, some).expected
    assert expected.keys() == {output}
    for runtime, files in CONVERSIONS.values():
        convert, *_ = files(of, rows.parts.train, ()).values()
        with run_program(runtime, convert(), of.tensors, of.outputs) as answer:
            np.testing.assert_allclose(answer(of.feeds(some))[output], expected[output], rtol=1e-5, atol=1e-6)


@pytest.mark.accept
@pytest.mark.slowest
@pytest.mark.parametrize(("kind", "output"), [("classes", "probabilities"), ("number", "value"), ("rank", "score")])
def test_a_package_of_each_kind_has_a_core_for_each_runtime(
    installed: None, kind: str, output: str, tmp_path: Path
) -> None:
    rows = material_of(kind, labelled(kind, ROWS), **TABLE, runtimes=RUNTIMES, gates=[])
    folders = {name: tmp_path / name for name in ("models", "cache", "runs")}
    trained = distill(rows, folder=folders["models"], cache=folders["cache"], runs=folders["runs"])
    report = export(
        rows, trained.path, tmp_path / "packages", contract=json.loads(CONTRACT.dumps()),
        profile=replace(SERVING, precision="fp32"), cache=folders["cache"],
    )  # fmt: skip
    # In INT8 ExecuTorch may be too far from the student; then the package says so.
    assert report.left_out.keys() <= {"core.int8.pte"}
    package = open_package(report.path)
    assert {variant.file for variant in package.manifest.variants if variant.core} >= FILES - {"core.int8.pte"}
    assert [tensor.name for tensor in package.manifest.outputs] == [output]
    compared = check_package(rows, package, trained.path, rows=50)
    assert {verdict.differing for verdict in compared.values()} == {0}


@pytest.mark.accept
@pytest.mark.slowest
def test_a_package_is_made_again_with_the_same_digest(
    of_table: ExportReport, table: DistillationReport, tmp_path: Path
) -> None:
    assert packaged(table.path, tmp_path, **TABLE, runtimes=RUNTIMES).digest == of_table.digest


@pytest.mark.accept
def test_a_table_has_a_core_for_each_runtime(of_table: ExportReport, table: DistillationReport) -> None:
    assert of_table.left_out == {}
    assert of_table.graph_parity == ["core.fp32.mlpackage.zip"]
    package = open_package(of_table.path)
    manifest, golden = package.manifest, read_golden(package)
    assert manifest.core == (NUMBERS, PLACES)
    cores = {variant.file: variant for variant in manifest.variants if variant.core}
    assert cores.keys() == FILES
    for file, variant in cores.items():
        assert variant.most == {"N": 1}
        assert variant.worst <= (0.05 if "int8" in file else 1e-6)
        for case in golden.cases:
            assert case.core.keys() == {"numbers", "places"}
            of_graph = case.outputs["model.fp32.ort"]["probability"].array
            np.testing.assert_allclose(case.outputs[file]["probability"].array, of_graph, atol=variant.tolerance)
    compared = check_package(
        material(training_set(ROWS), **TABLE, runtimes=RUNTIMES), package, table.path, rows=50
    )  # fmt: skip
    assert {verdict.differing for verdict in compared.values()} == {0}
    assert compared.keys() == {variant.file for variant in manifest.variants}
    inspection = inspect(of_table.path, runtime=OnnxRuntime())
    assert not [check.error for check in inspection.checks if check.error]
    assert {HEAD, *READERS} <= manifest.files.keys()
    assert "21 rows reproduce the tensors of the core bit for bit" in [check.finding for check in inspection.checks]
    assert inspection.worst.keys() == {f"model.{name}" for name in ("fp32.onnx", "fp32.ort", "int8.onnx", "int8.ort")}
    assert of_table.bytes["fp32"] + of_table.bytes["int8"] <= 250_000
    rows = material(training_set(ROWS), **TABLE)
    _require_same_bytes(rows, table.path, of_table.path, "fp32")


@pytest.mark.accept
@pytest.mark.slowest
def test_a_network_is_whole_in_each_runtime(of_network: ExportReport) -> None:
    assert of_network.left_out == {}
    manifest = read_package(of_network.path)
    assert manifest.core == ()
    worst = {file: worst for file, worst in of_network.worst.items() if file.endswith((".tflite", ".zip"))}
    assert worst.keys() == {"model.fp32.tflite", "model.fp32.mlpackage.zip"}
    assert max(worst.values()) <= 1e-6
    assert not [variant for variant in manifest.variants if variant.core]


@pytest.mark.accept
@pytest.mark.slowest
def test_compressed_files_are_smaller_and_within_their_tolerance(installed: None, tmp_path: Path) -> None:
    asked = {**NETWORK, "task": "tests.distill.kinds:Compressed"}
    trained = run(tmp_path, training_set(ROWS), **asked)
    report = packaged(trained.path, tmp_path / "packages", **asked, runtimes=("onnxruntime", "litert", "coreml"))
    assert report.left_out.keys() == {"int8"}
    variants = {variant.file: variant for variant in read_package(report.path).variants}
    for suffix, shares in {"tflite": (0.5, 0.65), "mlpackage.zip": (0.65, 0.8)}.items():
        whole, *smaller = (variants[f"model.{precision}.{suffix}"] for precision in ("fp32", "w8", "fp16"))
        for variant, share in zip(smaller, shares, strict=True):
            assert variant.bytes < share * whole.bytes, variant.file
            assert 1e-6 < variant.worst < 0.02
    shown = verify(report.path, "--runtime", "coreml", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    # Without w8, which the package's process converted before.
    _require_same_bytes(material(training_set(ROWS), **asked), trained.path, report.path, "fp16")


def _require_same_bytes(rows: Material, trained: Path, package: Path, precision: str) -> None:
    """Converted once more, in another process."""
    task, student, manifest = create_task(rows), restore(rows, trained).student, read_package(package)
    of = portable_part(task, student, rows.parts.test[:1], manifest.tensors, manifest.outputs)
    for runtime in ("litert", "coreml"):
        *_, (file, convert) = CONVERSIONS[runtime].files(of, rows.parts.train, (precision,)).items()
        assert f".{precision}." in file
        assert convert().model == (package / file).read_bytes()


@pytest.mark.accept
@pytest.mark.parametrize(("runtime", "file", "name"), [
    ("litert", "core.fp32.tflite", "LiteRT"), ("coreml", "core.fp32.mlpackage.zip", "Core ML"),
])  # fmt: skip
def test_it_is_verified_in_its_runtime(of_table: ExportReport, runtime: str, file: str, name: str) -> None:
    shown = verify(of_table.path, "--runtime", runtime, "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    report = json.loads(shown.stdout)
    assert list(report["worst"]) == [file]
    assert report["worst"][file] <= 1e-6
    checks = {check["check"]: check["found"] for check in report["checks"]}
    assert checks["core.fp32.pte"] == f"not run: pte format does not run in {name}"


@pytest.mark.accept
@pytest.mark.parametrize("runtime", ["executorch", "ai_edge_litert"])
@pytest.mark.parametrize("kind", ["of_table", pytest.param("of_network", marks=pytest.mark.slowest)])
def test_the_readme_runs(kind: str, runtime: str, request: pytest.FixtureRequest) -> None:
    package = request.getfixturevalue(kind).path
    blocks = re.findall(r"```python\n(.*?)```", (package / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if runtime in block]
    wrong = code.replace("<= 1e-5", "> 1e-5")
    both = f"{code}\ntry:\n    exec({wrong!r})\nexcept AssertionError:\n    print('not reproduced')"
    done = subprocess.run([sys.executable, "-c", both], cwd=package, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["not reproduced"]), done.stderr


@pytest.mark.accept
def test_core_ml_has_a_package_and_a_test(of_table: ExportReport) -> None:
    with zipfile.ZipFile(BytesIO((of_table.path / "core.fp32.mlpackage.zip").read_bytes())) as archive:
        manifest = json.loads(archive.read("core.fp32.mlpackage/Manifest.json"))
        names = {name.removeprefix("core.fp32.mlpackage/Data/") for name in archive.namelist()}
    paths = [entry["path"] for entry in manifest["itemInfoEntries"].values()]
    assert all(any(name.startswith(path) for name in names) for path in paths)
    assert manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["name"] == "model.mlmodel"
    test = (of_table.path / "CoreMLTests.swift").read_text(encoding="utf-8")
    assert 'let file = "core.fp32.mlpackage.zip"' in test
    assert 'example["core"]' in test
    readme = (of_table.path / "README.md").read_text(encoding="utf-8")
    assert "(graph parity)" in readme
    assert "run\n`CoreMLTests.swift` with the golden cases" in readme


class Masked(nn.Module):
    """Reads as much of a row as a mask says."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        read = x * mask
        return read.sum(1, keepdim=True), 2 * read


def _masked(*padded: str) -> Portable:
    """With a size that the graph leaves open."""
    tensors = [Described(name, "float", ("N", "P")) for name in ("x", "mask")]
    outputs = [Described("sum", "float", ("N", 1)), Described("twice", "float", ("N", "P"))]
    rows = {"x": np.arange(3, dtype=np.float32)[None], "mask": np.ones((1, 3), np.float32)}
    return Portable("model", Masked(), tensors, outputs, lambda _: rows, {"P": 5}, padded, np.arange(1))


def _litert(of: Portable) -> Converted:
    (convert,) = CONVERSIONS["litert"].files(of, of.row, ()).values()
    return convert()


def test_an_open_size_that_nothing_may_fill_up_is_named() -> None:
    with pytest.raises(GateFailed, match=r"size P is dynamic; .*padded = \['P'\]"):
        _litert(_masked())


CONVERTING = """
import os
from isthmus.distill.runtimes.exportedprogram import serve

def convert(program, file):
    if "w8" in file:
        raise ValueError("no such operator")
    return b"model" if "fp32" in file else os._exit(9)

serve(convert)
"""


@pytest.mark.accept
def test_a_conversion_that_fails_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "converting.py").write_text(CONVERTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    files = [f"model.{precision}.tflite" for precision in ("fp32", "w8", "fp16")]
    fp32, w8, fp16 = conversions(_masked("P"), files, LITERT, "converting", lambda _file: ("P",)).values()
    assert fp32().model == b"model"
    with pytest.raises(GateFailed, match=r"model\.w8\.tflite: LiteRT cannot convert the student: no such operator"):
        w8()
    with pytest.raises(GateFailed, match=r"model\.fp16\.tflite: .*: its process exited with 9: no output"):
        fp16()


@pytest.mark.accept
def test_zeros_fill_up_an_open_size_and_answers_are_cut(installed: None) -> None:
    of = _masked("P")
    program = _litert(of)
    assert (program.max_sizes, program.padded) == ({"N": 1, "P": 5}, ("P",))
    with run_program(LiteRTProgram, program, of.tensors, of.outputs) as run:
        for size in (1, 3, 5):
            x = np.arange(2 * size, dtype=np.float32).reshape(2, size)
            answers = run({"x": x, "mask": np.ones_like(x)})
            np.testing.assert_array_equal(answers["sum"], x.sum(1, keepdims=True))
            np.testing.assert_array_equal(answers["twice"], 2 * x)
    with (
        pytest.raises(GateFailed, match="P is 6, at most 5 is allowed"),
        run_program(LiteRTProgram, program, of.tensors, of.outputs) as run,
    ):
        run({name: np.ones((1, 6), np.float32) for name in ("x", "mask")})


class Odd(nn.Module):
    """Computes what phones have no operator for."""

    def forward(self, numbers: Tensor) -> Tensor:
        values: Tensor = torch.linalg.svdvals(numbers[:, :, None] * numbers[:, None, :])
        return values


class Foreign(kinds.Classes):
    """Its graph is no module that phones can have."""

    def network(self, _student: nn.Module) -> nn.Module:
        return Odd()


@pytest.mark.accept
@pytest.mark.slowest
def test_an_operator_that_a_runtime_lacks_is_named_before_training(installed: None, tmp_path: Path) -> None:
    notes: list[str] = []
    task = {"task": "tests.orchestration.models.test_portable:Foreign"}
    run(tmp_path, training_set(ROWS), notes=notes, **{**NETWORK, **task}, runtimes=("onnxruntime", "litert", "coreml"))
    first = next(place for place, note in enumerate(notes) if "student-0" in note)
    for name, runtime in (("LiteRT", "litert"), ("Core ML", "coreml")):
        words = rf"no model for {runtime}: model\.fp32\..*: {name} cannot convert the student: .*svd"
        assert any(re.search(words, note) for note in notes[:first])


@pytest.mark.accept
def test_a_head_that_cannot_be_is_named_before_training(tmp_path: Path) -> None:
    with traced():
        power = compile_columns({"y": F.pow(F.col("distance"), 0.3)}, {"distance": FLOAT}).model.SerializeToString()
    distance, y = request_column("distance", Float32), Column("y", Float64)
    transform = TransformContract("curve", (), (distance,), (y,), power)
    table = training_set(ROWS)
    table = table.append_column("curve__y", pc.power(pc.cast(table["distance"], pa.float64()), 0.3))
    rows = replace(
        material(table, **TABLE, runtimes=("onnxruntime", "executorch")),
        student_inputs=(*STUDENT, ModelInput("curve__y", Float64)),
        request_inputs=RequestInputs((transform,), (distance,), ((transform, y),)),
    )
    task, notes = create_task(rows), list[str]()
    with open_outputs(task, task.teacher(), np.arange(ROWS), tmp_path, lambda _text, _done: None) as outputs:
        rehearse(task, task.teacher(), outputs, rows.declaration.training_settings(PROFILE, 1000), notes.append)
    (note,) = notes
    assert "no head.json: head.json: a request transform of the student has Pow, whose last bit no standard" in note


@pytest.mark.accept
@pytest.mark.parametrize("file", ["core.fp32.tflite", "core.fp32.mlpackage.zip"])
@pytest.mark.parametrize("how", ["cut", "garbage", "nothing"])
def test_a_damaged_model_is_refused(of_table: ExportReport, file: str, how: str) -> None:
    package = of_table.path.with_name(f"{file}-{how}")
    package.mkdir()
    for each in of_table.path.iterdir():
        (package / each.name).write_bytes(each.read_bytes())
    whole = (package / file).read_bytes()
    damaged = {"cut": whole[: len(whole) // 2], "garbage": np.random.default_rng(5).bytes(len(whole)), "nothing": b""}
    (package / file).write_bytes(damaged[how])
    resum(package)
    runtime = ProgramRuntime(cast(Any, file.split(".")[2]))
    (found,) = [check for check in inspect(package, runtime=runtime).checks if check.error]
    assert (found.subject, "refuses it (" in found.finding) == (file, True), found
