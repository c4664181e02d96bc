import base64
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec
import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pytest
import tree_sitter_kotlin
import tree_sitter_swift
from tree_sitter import Language, Parser

from isthmus.distill.declaration import DEFAULT
from isthmus.distill.distillation import DistillationReport
from isthmus.distill.evaluation.metrics import sigmoid
from isthmus.distill.export import conversion
from isthmus.distill.export.conversion import in_precision
from isthmus.distill.export.export import ExportReport
from isthmus.distill.export.package import readme
from isthmus.distill.gates import Gate
from isthmus.distill.onnx.ortbytes import canonical
from isthmus.distill.onnx.runtime import ask, oldest_runtime, ort_format, predict, session
from isthmus.distill.restore import create_task
from isthmus.distill.tabular.graph import graph
from isthmus.distill.tabular.preparation import Prepare, preparation_graph
from isthmus.distill.tabular.student import Student
from isthmus.distill.tabular.tensors import TabularTensors
from isthmus.distill.tasks.task import Task
from isthmus.distill.types import Index
from isthmus.features.errors import (
    ConfigurationError,
    ContractMismatch,
    DataError,
    DependencyError,
    GateFailed,
    PackageError,
)
from isthmus.features.types import Int64
from isthmus.features.values.columns import from_python
from isthmus.package.checksums import README, SUMS
from isthmus.package.clients import CLIENTS, FOLDER, sources
from isthmus.package.golden import TensorBytes, read_golden
from isthmus.package.inputs import Feeds, feeds
from isthmus.package.manifest import open_package, package_digest, read_package
from isthmus.package.replay import require_reproduced
from isthmus.package.verdict import FeatureVerdict
from isthmus.transforms.preparation.fit import FittedNumber, FittedText, Preparation
from isthmus.transforms.preparation.steps import Embed, described
from tests.distill.conftest import DEVICE, SERVING, make_package
from tests.distill.packages import resum, rewritten
from tests.distill.support import CONTRACT, STUDENT, check_package, difference, material, run

OUTLIERS: dict[str, Any] = {"task": "tests.distill.kinds:Outliers", "seeds": 1, "epochs": 1}


def test_the_package_is_whole(exported: ExportReport, trained: DistillationReport) -> None:
    manifest = read_package(exported.path)
    assert {file.name for file in exported.path.iterdir()} == {
        "README.md",
        SUMS,
        "contract.json",
        "golden.json",
        "manifest.json",
        "preparation.json",
        *CLIENTS,
        *(f"model.{precision}.{form}" for precision in ("fp32", "int8") for form in ("onnx", "ort")),
    }
    assert exported.path.name == f"late-{exported.digest[:12]}"
    assert exported.digest == package_digest(exported.path)
    assert (manifest.model, manifest.contract, manifest.service) == (trained.id, CONTRACT, "features")
    assert manifest.model_inputs == STUDENT
    assert max(exported.bytes.values()) < 200_000
    # What an app is built from is not what a phone loads.
    unloaded = {README, *CLIENTS}
    loaded = [file for file in exported.path.iterdir() if file.name not in unloaded and ".int8." not in file.name]
    assert exported.bytes["fp32"] == sum(file.stat().st_size for file in loaded)
    assert {name: (exported.path / name).read_bytes() for name in CLIENTS} == sources(CLIENTS)
    assert manifest.device == DEVICE


def test_every_variant_keeps_its_tolerance(exported: ExportReport) -> None:
    for variant in read_package(exported.path).variants:
        assert variant.worst <= variant.tolerance == Task.tolerance[variant.precision]
        found, whole = (one.quality["auc"] for one in (variant, read_package(exported.path).variant("fp32")))
        assert found is not None
        assert whole == pytest.approx(found, abs=0.01)


def test_the_same_student_gives_the_same_bytes(
    exported: ExportReport, trained: DistillationReport, table: pa.Table, tmp_path: Path
) -> None:
    again = make_package(trained.path, table, tmp_path)
    assert again.digest == exported.digest
    for file in exported.path.iterdir():
        assert file.read_bytes() == (again.path / file.name).read_bytes()
    make_package(trained.path, table, tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == [again.path.name]


def test_golden_rows_hold_the_edges(exported: ExportReport) -> None:
    manifest = read_package(exported.path)
    usual, extremes = read_golden(open_package(exported.path)).cases
    assert (len(usual.rows), len(extremes.rows)) == (16, 5)
    assert (None,) * len(STUDENT) in extremes.rows
    assert any(value == float(np.finfo(np.float32).max) for row in extremes.rows for value in row)
    assert "\x7fnever in training" in extremes.feeds["categories"]
    for case in (usual, extremes):
        fed = feeds(STUDENT, read_golden(open_package(exported.path)).columns(case, STUDENT))
        for name, tensor in case.feeds.items():
            np.testing.assert_array_equal(fed[name], tensor)
        for variant in manifest.variants:
            opened = session((exported.path / variant.file).read_bytes(), 1)
            expected = {name: kept.array for name, kept in case.outputs[variant.file].items()}
            assert difference(expected, ask(opened, case.feeds)) <= 1e-6


def test_the_readme_predicts_the_golden_rows(exported: ExportReport, tmp_path: Path) -> None:
    code, example = blocks(exported.path, "python")
    (tmp_path / "predictor.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "predictor.py", exported.path], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "21 golden rows, largest difference 0" in done.stdout
    assert "carrier" in example
    wrong = code.replace("numbers[0]", "1 - numbers[0]")
    assert wrong != code
    (tmp_path / "predictor.py").write_text(wrong, encoding="utf-8")
    command = [sys.executable, "predictor.py", str(exported.path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "the answers differ from those recorded" in done.stderr


def test_predict_casts_as_training_does(exported: ExportReport) -> None:
    """Whole numbers beyond 2^53 are rounded once; a value that is missing is null only where the caller says so."""
    package: dict[str, Any] = {}
    exec(blocks(exported.path, "python")[0], package)  # noqa: S102 - the example is what is tested
    model = package["Predictor"](exported.path)
    row: dict[str, Any] = {item.name: None for item in STUDENT}
    whole = next(item for item in STUDENT if item.dtype == Int64)
    row[whole.name] = 2**62 + 2**38 + 1
    columns = {item.name: from_python([row[item.name]], item.dtype) for item in STUDENT}
    for name, tensor in feeds(STUDENT, columns).items():
        np.testing.assert_array_equal(model.feeds(row)[name], tensor)
    with pytest.raises(KeyError, match=f"no value for {whole.name}; pass None for a missing value"):
        model.predict({}, {name: value for name, value in row.items() if name != whole.name}, {})
    with pytest.raises(TypeError):
        model.predict({}, {**row, whole.name: 1.5}, {})


def test_the_readme_names_the_oldest_runtime_of_each_file(exported: ExportReport) -> None:
    text = (exported.path / "README.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| (model\.\S+) \| (\d+\.\d+) \|$", text, re.MULTILINE))
    assert table == {variant.file: "1.19" for variant in read_package(exported.path).variants}
    assert 'pip install numpy "onnxruntime>=1.19"' in text


@pytest.mark.parametrize(
    ("operator", "domain", "opset", "oldest"),
    [
        ("Relu", "", 21, "1.19"), ("Relu", "", 22, None), ("MatMulNBits", "com.microsoft", 20, "1.22"),
        ("GatherBlockQuantized", "com.microsoft", 20, "1.23"), ("Unheard", "com.microsoft", 20, None),
        ("Own", "my.operators", 20, None),
    ],
)  # fmt: skip
def test_a_graph_opens_where_all_its_operators_are_known(
    operator: str, domain: str, opset: int, oldest: str | None
) -> None:
    """None stands for the release at hand."""
    node = onnx.helper.make_node(operator, ["x"], ["y"], domain=domain)
    ends = [onnx.helper.make_tensor_value_info(name, 1, ["n"]) for name in "xy"]
    opsets = [onnx.helper.make_opsetid(name, version) for name, version in {"": opset, domain: opset}.items()]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "one", ends[:1], ends[1:]), opset_imports=opsets, ir_version=10
    )
    newest = ".".join(onnxruntime.__version__.split(".")[:2])
    assert oldest_runtime(model.SerializeToString()) == (oldest or newest)
    model.ir_version = 11
    assert oldest_runtime(model.SerializeToString()) == newest


def blocks(package: Path, language: str) -> list[str]:
    """The code of a README in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (package / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    ("name", "grammar", "client"),
    [("kotlin", tree_sitter_kotlin, "Snapshots.kt"), ("swift", tree_sitter_swift, "Snapshots.swift")],
)
def test_the_code_for_phones_is_code(exported: ExportReport, name: str, grammar: ModuleType, client: str) -> None:
    """No phone is here: what can be said is that the other two languages read it."""
    manifest = read_package(exported.path)
    program = msgspec.structs.replace(manifest.variants[0], file="model.fp32.pte", format="pte")
    files = {file.name: file.read_bytes() for file in exported.path.iterdir()}
    manifest = msgspec.structs.replace(manifest, variants=[*manifest.variants, program])
    text = readme(manifest, {"views": {}}, read_golden(open_package(exported.path)), files)
    parser = Parser(Language(grammar.language()))
    found = re.findall(rf"```{name}\n(.*?)```", text, re.DOTALL)
    assert len(found) == 4
    assert "carrier" in found[1]
    assert "carrier" in found[3]
    for code in [*found, (FOLDER / client).read_text(encoding="utf-8")]:
        assert not re.search(r"\{\{|\{%", code)
        assert not parser.parse(code.encode()).root_node.has_error
        # Without the first parenthesis that is not in a comment.
        wrong = re.sub(r"^(?! *(?://|/?\*))([^)\n]*)\)", r"\1", code, count=1, flags=re.MULTILINE)
        assert parser.parse(wrong.encode()).root_node.has_error


def test_the_package_answers_as_the_student(
    exported: ExportReport, trained: DistillationReport, table: pa.Table, tmp_path: Path
) -> None:
    result = check_package(material(table), open_package(exported.path), trained.path, rows=500)
    assert set(result) == {f"model.{precision}.{form}" for precision in ("fp32", "int8") for form in ("onnx", "ort")}
    assert {(one.compared, one.differing) for one in result.values()} == {(500 + 21, 0)}
    for variant in read_package(exported.path).variants:
        assert result[variant.file].tolerance == variant.tolerance
        assert result[variant.file].worst <= (1e-5 if variant.precision == "fp32" else variant.tolerance)
    other = run(tmp_path, table, seed=1)
    with pytest.raises(PackageError, match="made from student"):
        check_package(material(table, seed=1), open_package(exported.path), other.path, rows=5)
    # A student swapped behind the same record is what the comparison is for.
    shutil.copy(trained.path / "report.json", other.path)
    wrong = check_package(material(table), open_package(exported.path), other.path, rows=500)
    assert all(one.differing > 0 for one in wrong.values())
    # Nor does it help to say that it may differ by more.
    lax = Path(shutil.copytree(exported.path, tmp_path / "lax"))
    rewritten("manifest.json", lambda m: [one.update(tolerance=1e9) for one in m["variants"]])(lax)
    lenient = check_package(material(table), open_package(lax), other.path, rows=500)
    assert all(one.differing > 0 for one in lenient.values())
    first = wrong["model.fp32.onnx"].examples[0]
    assert first.key.startswith("row ")
    assert first.event_timestamp is not None


def outside(package: Path, location: str) -> bytes:
    """Puts the weights of a model file elsewhere; gives them."""
    file = package / "model.fp32.onnx"
    model = onnx.load(file)
    largest = max(model.graph.initializer, key=lambda one: len(one.raw_data))
    weights = largest.raw_data
    largest.ClearField("raw_data")
    largest.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(len(weights)))):
        largest.external_data.add(key=key, value=value)
    file.write_bytes(model.SerializeToString())
    return bytes(weights)


def test_weights_beside_a_model_are_those_of_the_package(
    exported: ExportReport,
    trained: DistillationReport,
    table: pa.Table,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def checked(package: Path) -> Mapping[str, FeatureVerdict]:
        return check_package(material(table), open_package(package), trained.path, rows=50)

    package, elsewhere = Path(shutil.copytree(exported.path, tmp_path / "package")), tmp_path / "elsewhere"
    weights = outside(package, "weights.bin")
    assert len(weights) > 500
    resum(package)
    elsewhere.mkdir()
    (elsewhere / "weights.bin").write_bytes(weights)
    monkeypatch.chdir(elsewhere)
    # Only the working folder has them.
    with pytest.raises(PackageError, match=r"model\.fp32\.onnx: onnxruntime refuses it \(.*weights\.bin"):
        checked(package)
    # The working folder has others.
    (elsewhere / "weights.bin").write_bytes(bytes(len(weights)))
    (package / "weights.bin").write_bytes(weights)
    rewritten("manifest.json", lambda m: m["files"].update({"weights.bin": "weights of model.fp32.onnx"}))(package)
    assert not any(one.differing for one in checked(package).values())
    # They lie beside the package, by its own account.
    beside = Path(shutil.copytree(exported.path, tmp_path / "beside"))
    outside(beside, "../elsewhere/weights.bin")
    resum(beside)
    (elsewhere / "weights.bin").write_bytes(weights)
    with pytest.raises(PackageError, match=r"model\.fp32\.onnx: onnxruntime refuses it"):
        checked(beside)


def test_all_budgets_that_are_missed_are_said(trained: DistillationReport, table: pa.Table, tmp_path: Path) -> None:
    tight = replace(SERVING, latency_objective_ms=1e-6, memory_mb=0, load_ms=1e-6, package_kb=1)
    with pytest.raises(GateFailed) as caught:
        make_package(trained.path, table, tmp_path, tight)
    keys = ("latency_objective_ms", "memory_mb", "load_ms", "package_kb")
    assert caught.value.where == ", ".join(f"profiles.serving.{key}" for key in keys)
    assert caught.value.found.count(";") == 3
    assert caught.value.expected == "at most 1e-06 ms; at most 0 MiB; at most 1e-06 ms; at most 1 kB"
    assert caught.value.remedy.endswith("or measure on an idle machine")
    assert not [*tmp_path.iterdir()]


@pytest.mark.accept
def test_what_must_not_be_exported(trained: DistillationReport, table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match="p99 of one row"):
        make_package(trained.path, table, tmp_path, replace(SERVING, latency_objective_ms=1e-6))
    with pytest.raises(GateFailed, match=r"session of the model uses .* Make the student smaller, raise the limit$"):
        make_package(trained.path, table, tmp_path, replace(SERVING, memory_mb=0))
    with pytest.raises(GateFailed, match=r"loading and the first prediction take .* ms; expected at most 1e-06 ms"):
        make_package(trained.path, table, tmp_path, replace(SERVING, load_ms=1e-6))
    with pytest.raises(
        GateFailed, match=r"a package with only int8 has .* kB; expected at most 10 kB\. .* fewer golden"
    ):
        make_package(trained.path, table, tmp_path, replace(SERVING, package_kb=10))
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ContractMismatch, match="trained under contract cccccccccccc; expected dddddddddddd"):
        make_package(trained.path, table, tmp_path, contract="d" * 64)
    with pytest.raises(ContractMismatch, match="was trained on training set set-1; expected set-2"):
        make_package(trained.path, table, tmp_path, training_set="set-2")
    with pytest.raises(ContractMismatch, match="its declaration has changed since it was trained"):
        make_package(trained.path, table, tmp_path, hidden=(16, 9))
    with pytest.raises(DataError, match=r"student\.safetensors: cannot be read"):
        make_package(damaged(trained.path, tmp_path.parent / "cut" / "x"), table, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.accept
def test_answers_of_no_rows_are_compared_and_of_other_rows_differ(table: pa.Table, tmp_path: Path) -> None:
    own: dict[str, Any] = {"task": "tests.distill.kinds:Edged", "seeds": 1, "epochs": 1}
    trained = run(tmp_path, table, **own)
    package = make_package(trained.path, table, tmp_path, replace(SERVING, latency_objective_ms=1000), **own).path

    def differing() -> dict[str, int]:
        found = check_package(material(table, **own), open_package(package), trained.path, rows=20)
        return {file: one.differing for file, one in found.items() if one.differing}

    assert differing() == {}

    def cut(golden: Any) -> None:
        kept = golden["cases"][0]["outputs"]["model.fp32.onnx"]["logits"]
        logits = TensorBytes(kept["element"], kept["shape"], base64.b64decode(kept["data"])).array[1:]
        golden["cases"][0]["outputs"]["model.fp32.onnx"]["logits"] = msgspec.to_builtins(TensorBytes.of(logits))

    rewritten("golden.json", cut)(package)
    assert differing().keys() == {"model.fp32.onnx"}


@pytest.fixture(scope="module")
def coarse(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> DistillationReport:
    return run(tmp_path_factory.mktemp("coarse"), table, task="tests.distill.kinds:Coarse", seeds=1, epochs=1)


@pytest.mark.accept
def test_a_precision_that_is_too_coarse_is_left_out(
    coarse: DistillationReport, table: pa.Table, tmp_path: Path
) -> None:
    def made(precision: Literal["fp32", "int8", "fastest"], **changes: Any) -> ExportReport:
        profile = replace(SERVING, precision=precision)
        own = {"task": "tests.distill.kinds:Coarse", "seeds": 1, "epochs": 1, **changes}
        return make_package(coarse.path, table, tmp_path, profile, **own)

    exported = made("fp32")
    assert exported.left_out.keys() == {"int8"}
    # The declared 1e-12, or two float32 steps at the number where they are more.
    (limit,) = re.findall(r"expected at most ([\d.e-]+\d)", exported.left_out["int8"])
    assert 1e-12 <= float(limit) < 1e-6
    manifest = read_package(exported.path)
    assert [variant.file for variant in manifest.variants] == ["model.fp32.onnx", "model.fp32.ort"]
    assert (manifest.inputs, manifest.metric) == ((), "accuracy")
    assert [(one.name, one.element, one.shape) for one in manifest.tensors] == [("x", "float", ("N", 2))]
    assert [(one.name, one.element, one.shape) for one in manifest.outputs] == [("logits", "float", ("N", 5))]
    assert made("fastest").served.precision == "fp32"
    assert made("fastest").digest == exported.digest
    with pytest.raises(GateFailed, match=r"model\.int8\.onnx: .* answers .* where the student in torch answers"):
        made("int8")
    with pytest.raises(GateFailed, match=r"model\.fp32\.onnx: student.accuracy is .*; expected student.acc"):
        made("fastest", gates=[Gate("student.accuracy", at_least=1.5)])


def test_a_gate_holds_of_each_precision(
    exported: ExportReport, trained: DistillationReport, table: pa.Table, tmp_path: Path
) -> None:
    exact, coarse = (exported.quality[f"model.{precision}.onnx"]["log_loss"] for precision in ("fp32", "int8"))
    assert exact is not None
    assert coarse is not None
    assert exact != coarse
    between = {"at_most" if exact < coarse else "at_least": (exact + coarse) / 2}
    report = make_package(
        trained.path, table, tmp_path, replace(SERVING, precision="fp32"), gates=[Gate("student.log_loss", **between)]
    )
    assert "model.int8.onnx: student.log_loss is" in report.left_out["int8"]


def test_the_fastest_precision_is_found_by_measuring(
    exported: ExportReport, trained: DistillationReport, table: pa.Table, tmp_path: Path
) -> None:
    found = make_package(trained.path, table, tmp_path, replace(SERVING, precision="fastest"))
    assert found.digest == exported.digest
    assert found.served.precision in ("fp32", "int8")
    assert exported.served.precision == "int8"


@pytest.fixture(scope="module")
def outliers(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> DistillationReport:
    return run(tmp_path_factory.mktemp("outliers"), table, **OUTLIERS)


@pytest.mark.accept
def test_the_first_precision_within_its_tolerance_is_the_smallest(
    outliers: DistillationReport, table: pa.Table, tmp_path: Path
) -> None:
    def made(precision: Any) -> ExportReport:
        return make_package(outliers.path, table, tmp_path, replace(SERVING, precision=precision), **OUTLIERS)

    whole, report = made("fastest"), made("smallest")
    assert ([*whole.left_out], [*whole.bytes]) == (["int8"], ["fp32"])
    assert report.served.precision == "w8"
    assert re.match(r"model\.int8\.onnx: .* answers .* where the student in torch answers", report.left_out["int8"])
    for coarser in ("int8", "mixed"):
        apart = re.search(r" ([\d.]+) apart; expected at most 0\.02, tolerance", report.left_out[coarser])
        assert apart is not None
        assert float(apart[1]) > 0.02
    assert report.left_out["fp16"] == "model.fp16: not needed: w8 passes and comes first"
    assert list(report.bytes) == ["fp32", "w8"]
    package = open_package(report.path)
    files = {variant.file: variant for variant in package.manifest.variants}
    assert list(files) == [f"model.{precision}.{form}" for precision in ("fp32", "w8") for form in ("onnx", "ort")]
    for form in ("onnx", "ort"):
        small, large = files[f"model.w8.{form}"], files[f"model.fp32.{form}"]
        assert small.bytes < 0.6 * large.bytes
        assert (small.precision, small.tolerance) == ("w8", 0.02)
        assert 0 < small.worst < 0.02
    compared = check_package(material(table, **OUTLIERS), package, outliers.path)
    assert {file: each.differing for file, each in compared.items()} == dict.fromkeys(files, 0)
    assert made("w8").digest == report.digest
    half = made("fp16")
    assert (half.served.precision, list(half.bytes)) == ("fp16", ["fp32", "fp16"])
    assert whole.bytes["fp32"] > half.bytes["fp16"] > report.bytes["w8"]


@pytest.mark.accept
@pytest.mark.slowest
def test_a_mixed_file_may_differ_between_processors_by_its_tolerance(table: pa.Table, tmp_path: Path) -> None:
    declared = {**OUTLIERS, "task": "tests.distill.kinds:Mixed"}
    model = run(tmp_path, table, **declared)
    told = list[str]()
    report = make_package(model.path, table, tmp_path, replace(SERVING, precision="smallest"),
                          progress=lambda text, _: told.append(text), **declared)  # fmt: skip
    assert (report.served.precision, [*report.bytes]) == ("mixed", ["fp32", "mixed"])
    assert report.left_out.keys() == {"int8", "w8", "fp16"}
    assert report.left_out["w8"] == "model.w8: not needed: mixed passes and comes first"
    assert {f"no {name}: {why}" for name, why in report.left_out.items()} < {*told}
    package = open_package(report.path)
    golden, variants = read_golden(package), package.manifest.variants
    assert [(each.precision, each.rounding) for each in variants] == 2 * [("fp32", None)] + 2 * [("mixed", 2.0)]
    mixed = variants[-1]
    outputs = [{name: tensor.array for name, tensor in case.outputs[mixed.file].items()} for case in golden.cases]
    moved = [{name: array + np.float32(1.5) for name, array in each.items()} for each in outputs]
    assert require_reproduced(golden, package.manifest, mixed, moved) == pytest.approx(1.5, abs=1e-3)
    far = [{name: array + np.float32(3) for name, array in each.items()} for each in outputs]
    with pytest.raises(PackageError, match=r"differences of at most 2"):
        require_reproduced(golden, package.manifest, mixed, far)


@pytest.mark.accept
@pytest.mark.slowest
def test_a_precision_that_saves_nothing_is_left_out(
    coarse: DistillationReport, exported: ExportReport, trained: DistillationReport, table: pa.Table, tmp_path: Path
) -> None:
    small: dict[str, Any] = {"task": "tests.distill.kinds:Coarse", "seeds": 1, "epochs": 1}
    report = make_package(coarse.path, table, tmp_path, replace(SERVING, precision="smallest"), **small)
    assert report.served.precision == "fp32"
    assert report.left_out.keys() == {"int8", "mixed", "w8", "fp16"}
    assert re.match(r"model\.w8\.ort: has [\d,]+ bytes; expected fewer than the [\d,]+ of fp32", report.left_out["w8"])
    with pytest.raises(GateFailed, match=r"model\.fp16\.ort: has .* bytes.* Serve fp32"):
        make_package(coarse.path, table, tmp_path, replace(SERVING, precision="fp16"), **small)
    with pytest.raises(ConfigurationError, match=r"int4.*expected a precision that the task has: fp32, int8"):
        make_package(coarse.path, table, tmp_path, replace(SERVING, precision="int4"), **small)
    # INT8 of this model is within its tolerance, but larger.
    assert exported.left_out == {}
    smallest = make_package(trained.path, table, tmp_path, replace(SERVING, precision="smallest"))
    assert smallest.served.precision == "fp32"
    assert re.match(r"model\.int8\.ort: has [\d,]+ bytes; expected fewer than", smallest.left_out["int8"])


def damaged(model: Path, copy: Path) -> Path:
    shutil.copytree(model, copy)
    (copy / "student.safetensors").write_bytes((model / "student.safetensors").read_bytes()[:100])
    return copy


@pytest.mark.parametrize(("numbers", "words"), [(2, ()), (0, (("a", "é"),)), (1, ((), ("x",)))])
def test_graphs_of_every_shape_answer_like_torch(numbers: int, words: tuple[tuple[str, ...], ...]) -> None:
    steps = tuple(described(step) for step in DEFAULT)
    learned = Preparation(
        tuple(FittedNumber(f"n{n}", steps, ((0.5, 0.5), (0.0,)), n == 0) for n in range(numbers)),
        tuple(
            FittedText(f"t{n}", described(Embed()), {word: place for place, word in enumerate(known, 1)})
            for n, known in enumerate(words)
        ),
    )
    student = Student(Prepare(learned, preparation_graph(learned)), (5,), 0.1)
    numeric = np.array([[np.nan, 1e38], [-1, 3], [0.1, -np.inf]], np.float32)[:, :numbers]
    categories = np.array([["é", "x"], ["", ""], ["?", "x"]], object)[:, : len(words)]
    data = TabularTensors(numeric, categories)
    model = graph(student).SerializeToString()
    for form in (model, ort_format(model)):
        for rows in (data, data[:1]):
            fed = {name: tensor for name, tensor in msgspec.structs.asdict(rows).items() if tensor.shape[1]}
            answer = predict(session(form, 1), fed)
            np.testing.assert_allclose(answer, sigmoid(student.logits(rows)), atol=1e-6)


def test_a_full_disk_is_said(exported: ExportReport) -> None:
    model = (exported.path / "model.fp32.onnx").read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128, before[1]))
    try:
        with pytest.raises(DependencyError, match=r"model\.ort: cannot be written .*Free disk space there"):
            ort_format(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_ort_file_is_written_one_way(exported: ExportReport) -> None:
    for precision in ("fp32", "int8"):
        source = (exported.path / f"model.{precision}.onnx").read_bytes()
        kept = (exported.path / f"model.{precision}.ort").read_bytes()
        assert {ort_format(source) for _ in range(5)} == {kept}
        assert canonical(kept) == kept
    with pytest.raises(ValueError, match="not a model in ORT format"):
        canonical(source)


@pytest.mark.parametrize(("most", "rows"), [(1 << 20, 1000), (8 * 300, 300), (8 * 30, 100)])
def test_large_rows_calibrate_in_smaller_number(
    table: pa.Table, monkeypatch: pytest.MonkeyPatch, most: int, rows: int
) -> None:
    """Of eight bytes each, a hundred in a part."""
    monkeypatch.setattr(conversion, "CALIBRATION_ROWS", 1000)
    monkeypatch.setattr(conversion, "CALIBRATION_BYTES", most)
    task, asked = create_task(material(table, task="tests.distill.sampletasks:Shaped")), list[Index]()
    feeds = task.feeds

    def counted(rows: Index) -> Feeds:
        asked.append(rows)
        return feeds(rows)

    monkeypatch.setattr(task, "feeds", counted)
    in_precision(task, task.model(task.student().eval()), "int8", [])
    (one, *parts) = asked
    assert len(one) == 1
    assert (sum(map(len, parts)), max(map(len, parts))) == (rows, 100)
    assert {*np.concatenate(parts)} <= {*task.material.parts.train}
