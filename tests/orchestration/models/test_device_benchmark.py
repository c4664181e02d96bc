"""`isthmus model benchmark-device`, and bounds on what devices measured."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from isthmus.distill.gates import DEVICE_FIGURES, Gate, bound_problems
from isthmus.features.errors import DataError, GateFailed
from isthmus.orchestration.artifacts import Artifacts, devices_folder
from isthmus.orchestration.models.devices import benchmark_device, device_bounds
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.project import Project
from isthmus.package.device.measurement import read_all
from isthmus.package.device.target import FileResult, Target
from isthmus.package.manifest import package_digest
from isthmus.package.snapshot.signature import SnapshotSigner, create_key
from tests.commandline import run
from tests.orchestration.shop import Shop

HERE = Target.parse(sys.executable)


def bounded(shop: Shop, bound: str) -> Project:
    shop.replace("seeds=1, gates=[", f"seeds=1, bounds=[Gate({bound})], gates=[")
    return Project(shop.root)


@pytest.mark.accept
def test_a_measurement_is_signed_and_required(exported: Shop) -> None:
    project = bounded(exported, '"device.p99_us", at_most=1e9')
    with pytest.raises(GateFailed, match=r"device\.p99_us has no value.*benchmark-device"):
        deploy(project)
    shown = run("model", "benchmark-device", "--on", sys.executable, "--json", cwd=exported.root)
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    package = Artifacts.of(project).last_package()
    assert report["package"] == package_digest(package)
    assert [file["file"] for file in report["files"]] == [
        "model.fp32.onnx", "model.fp32.ort", "model.int8.onnx", "model.int8.ort",
    ]  # fmt: skip
    assert all(file["worst"] <= 1e-5 and 0 < file["p50_us"] <= file["p99_us"] for file in report["files"])
    assert report["bounds"] == [{"metric": "device.p99_us", "found": report["bounds"][0]["found"], "holds": True}]
    # The next obstacle: nothing was verified.
    with pytest.raises(GateFailed, match="verdict"):
        deploy(project)
    text = run("model", "benchmark-device", "--on", sys.executable, cwd=exported.root).stdout
    assert "Signed measurement: " in text
    assert len([*devices_folder(package).iterdir()]) == 1, "one per target and processor"


def test_a_slow_device_breaks_its_bound(exported: Shop) -> None:
    project = bounded(exported, '"device.p50_us", at_most=0.001')
    shown = run("model", "benchmark-device", "--on", sys.executable, "--json", cwd=exported.root)
    assert (shown.returncode, json.loads(shown.stdout)["bounds"][0]["holds"]) == (1, False)
    with pytest.raises(GateFailed, match=r"device\.p50_us is .* expected device\.p50_us at most 0\.001"):
        deploy(project)


def test_only_the_project_s_own_measurement_counts(exported: Shop, tmp_path: Path) -> None:
    project = bounded(exported, '"device.differing", at_most=0')
    report = benchmark_device(project, None, HERE)
    assert [bound.holds for bound in device_bounds(project, project.distillation())] == [True]
    signed = report.file.read_bytes()
    written = json.loads(signed)
    create_key(tmp_path / "other.pem")
    other = SnapshotSigner.of(tmp_path / "other.pem").public_key
    with pytest.raises(DataError, match="not signed by the key"):
        [*read_all(report.file.parent, report.measurement.package, other)]
    changed = {**written, "measurement": {**written["measurement"], "target": "another"}}
    for content, problem in (
        (json.dumps(changed), "changed after it was signed"),
        ("{", "cannot be read"),
        (json.dumps({**written, "signature": "AAAA"}), "changed after it was signed"),
    ):
        report.file.write_text(content)
        with pytest.raises(DataError, match=f"{problem}.*benchmark-device"):
            device_bounds(project, project.distillation())
    report.file.write_bytes(signed)
    with pytest.raises(DataError, match="belongs to package"):
        [*read_all(report.file.parent, "0" * 64, SnapshotSigner.of(project.snapshots / "key.pem").public_key)]


@pytest.mark.accept
def test_a_failing_device_loses_no_measurement(exported: Shop) -> None:
    project = Project(exported.root)
    before = benchmark_device(project, None, HERE).file
    for target, code in (("/no/python", 3), ("'", 2), (f"{sys.executable} -I -S", 3)):
        shown = run("model", "benchmark-device", "--on", target, cwd=exported.root)
        assert (shown.returncode, len(shown.stderr.splitlines())) == (code, 1)
    assert [*before.parent.iterdir()] == [before]
    package = Artifacts.of(project).last_package()
    (package / "golden.json").write_bytes(b"{}")
    shown = run("model", "benchmark-device", "--on", sys.executable, cwd=exported.root)
    assert (shown.returncode, "golden.json" in shown.stderr) == (1, True)


def test_a_package_s_folder_takes_no_measurement(exported: Shop) -> None:
    project = Project(exported.root)
    package = Artifacts.of(project).last_package()
    before = {file.name: file.read_bytes() for file in package.iterdir()}
    benchmark_device(project, None, HERE)
    assert {file.name: file.read_bytes() for file in package.iterdir()} == before
    shutil.rmtree(devices_folder(package))


@pytest.mark.parametrize("name", DEVICE_FIGURES)
def test_every_model_may_have_bounds_on_devices(name: str) -> None:
    assert name in FileResult.__struct_fields__
    assert bound_problems("x", None, [Gate(f"device.{name}", at_most=1)]) == []


def test_an_unknown_figure_of_a_device_is_refused() -> None:
    (problem,) = bound_problems("x", None, [Gate("device.p98_us", at_most=1)])
    assert problem.expected == "device, a dot, and one of differing, load_ms, memory_mb, p50_us, p99_us, worst"
