import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pytest

from isthmus.distill.distillation import DistillationReport
from isthmus.distill.export.export import ExportReport
from isthmus.distill.export.ladder import compare_forms
from isthmus.distill.onnx.runtime import ort_format
from isthmus.features.errors import DependencyError, GateFailed, PackageError
from isthmus.package.golden import Inputs
from isthmus.package.inspect import OnnxRuntime, Runtime
from isthmus.package.manifest import Package, Variant, open_package, read_package
from isthmus.package.replay import Answers
from tests.distill.packages import resum, rewritten
from tests.distill.support import material, run

FILES = ["model.fp32.onnx", "model.int8.onnx", "model.fp32.ort", "model.int8.ort"]
ORT = {"ONNX Runtime": OnnxRuntime}


@pytest.fixture
def package(exported: ExportReport, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported.path, tmp_path / exported.path.name))


def test_every_rung_holds(exported: ExportReport, trained: DistillationReport, table: pa.Table) -> None:
    found = compare_forms(material(table), open_package(exported.path), trained.path, ORT)
    assert [rung.form for rung in found.rungs] == ["student", "exported program", *FILES]
    # The graph of a table is written node by node.
    assert [rung.holds for rung in found.rungs] == [True, None, *[True] * 4]
    for rung in found.rungs[2:]:
        kept = read_package(exported.path).variant("int8" if "int8" in rung.form else "fp32")
        assert rung.worst is not None
        # The trial asks more rows than the golden ones.
        assert rung.worst <= kept.worst <= rung.tolerance == kept.tolerance
    found.require()
    assert json.loads(json.dumps(found.as_dict()))["passed"]


def test_the_first_rung_that_breaks_is_named(package: Path, trained: DistillationReport, table: pa.Table) -> None:
    model = onnx.load_model(package / "model.fp32.onnx")
    first = next(node.input[2] for node in model.graph.node if node.op_type == "Gemm")
    bias = next(one for one in model.graph.initializer if one.name == first)
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + np.float32(0.25), first))
    # What a fault between ONNX and ORT format would do: everything before it holds.
    (package / "model.fp32.ort").write_bytes(ort_format(model.SerializeToString()))
    resum(package)
    found = compare_forms(material(table), open_package(package), trained.path, ORT)
    holding = {rung.form: rung.holds for rung in found.rungs if rung.runtime != "torch"}
    assert holding == dict.fromkeys(FILES, True) | {"model.fp32.ort": False}
    assert found.broken is not None
    assert found.broken.form == "model.fp32.ort"
    assert found.broken.case in (0, 1)
    with pytest.raises(
        GateFailed,
        match=r"model.fp32.ort in ONNX Runtime: (row \d+ of the training set|golden row \d), output "
        r"probability: answers [\d.]+ where the student in torch answers [\d.]+, .* apart; .*within 1e-05",
    ):
        found.require()


class Lossy(OnnxRuntime):
    """Loses a number."""

    def ask(self, package: Package, variant: Variant, cases: Sequence[Inputs]) -> Sequence[Answers]:
        found = super().ask(package, variant, cases)
        return [{name: np.where(np.arange(len(array)) == 0, np.nan, array) for name, array in one.items()}
                for one in found]  # fmt: skip


class Unusable(OnnxRuntime):
    """Is installed, and lacks a library."""

    def ask(self, *_: object) -> Sequence[Answers]:
        raise DependencyError("a runtime", "cannot be imported", remedy="install it")


def missing() -> Runtime:
    raise DependencyError("node", "is not there", remedy="install it")


def test_runtimes_come_one_after_the_other(
    exported: ExportReport, trained: DistillationReport, table: pa.Table
) -> None:
    runtimes = {**ORT, "web": missing, "old": Unusable, "lossy": Lossy}
    found = compare_forms(material(table), open_package(exported.path), trained.path, runtimes)
    states = [(rung.runtime, rung.holds) for rung in found.rungs]
    ours, lossy = [("ONNX Runtime", True)] * 4, [("lossy", False)] * 4
    old = [("old", None)] * 4
    assert states == [("torch", True), ("torch", None), *ours, ("web", None), *old, *lossy]
    assert found.broken is not None
    assert (found.broken.runtime, found.broken.worst) == ("lossy", float("inf"))
    unknown = found.rungs[6]
    assert "is not there" in unknown.outcome


def test_a_file_that_no_runtime_takes_breaks(package: Path, trained: DistillationReport, table: pa.Table) -> None:
    (package / "model.int8.onnx").write_bytes(b"no graph")
    resum(package)
    broken = compare_forms(material(table), open_package(package), trained.path, ORT).broken
    assert broken is not None
    assert (broken.form, broken.worst) == ("model.int8.onnx", None)
    assert "refuses it" in broken.outcome


def test_a_package_of_others_has_no_ladder(
    package: Path, trained: DistillationReport, table: pa.Table, tmp_path: Path
) -> None:
    other = run(tmp_path / "other", table, seed=1)
    with pytest.raises(PackageError, match="made from student"):
        compare_forms(material(table, seed=1), open_package(package), other.path, ORT)
    rewritten("golden.json", lambda golden: golden["cases"].reverse())(package)
    with pytest.raises(PackageError, match="does not match the student's test part"):
        compare_forms(material(table), open_package(package), trained.path, ORT)
