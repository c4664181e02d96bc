"""The device of a server: where ONNX Runtime lacks it, nothing runs on the CPU instead."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from isthmus.features.errors import DependencyError, GateFailed, PackageError
from isthmus.features.profiles import ServingDevice, ServingProfile
from isthmus.package import replay
from isthmus.package.golden import read_golden
from isthmus.package.inspect import ServedRuntime
from isthmus.package.manifest import open_package, package_digest
from isthmus.package.verdict import FeatureVerdict, Verdict
from isthmus.serving.deployment.record import approve, unverified_deployment
from isthmus.serving.predict.model import DeployedModel
from tests.distill.packages import contract, of_rows

GPUS: list[ServingDevice] = ["cuda", "tensorrt"]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_rows(tmp_path_factory.mktemp("student"))


def served_by(package: Path, device: ServingDevice) -> DeployedModel:
    profile = ServingProfile(precision="fp32", device=device)
    return DeployedModel(unverified_deployment(open_package(package), profile, 0, None))


@pytest.mark.parametrize("device", GPUS)
def test_a_device_that_onnx_runtime_lacks_is_one_error(package: Path, device: ServingDevice) -> None:
    with pytest.raises(DependencyError) as found:
        replay.require_device(device)
    assert found.value.where == "profiles.serving.device"
    assert f'"{device}", but ONNX Runtime' in found.value.found
    assert "install onnxruntime-gpu[cuda,cudnn]" in found.value.remedy
    assert 'or set device = "cpu"' in found.value.remedy
    with pytest.raises(DependencyError, match=r"profiles\.serving\.device"):
        served_by(package, device)


def test_libraries_of_tensorrt_are_loaded_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt_libs.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["TensorrtExecutionProvider"])
    with pytest.raises(DependencyError, match="cannot start TensorrtExecutionProvider") as found:
        replay.require_device("tensorrt")
    assert "tensorrt<11" in found.value.remedy
    assert sys.modules.pop("tensorrt_libs").__file__ == str(tmp_path / "tensorrt_libs.py")
    assert os.environ.pop("NVIDIA_TF32_OVERRIDE") == "0"


def test_a_model_that_would_run_on_the_cpu_alone_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A provider that every build has, and that runs no operator of ours.
    monkeypatch.setitem(replay._PROVIDERS, "cuda", (("AzureExecutionProvider", {}),))
    with pytest.raises(PackageError, match="it would run on CPUExecutionProvider only"):
        served_by(package, "cuda")


def test_a_gpu_opens_the_onnx_file_and_a_cpu_the_ort_file(package: Path) -> None:
    manifest = open_package(package).manifest
    files = {device: ServedRuntime(ServingProfile(device=device)).files(manifest) for device in ("cpu", *GPUS)}
    assert [[file.file for file in part] for part in files.values()] == [
        ["model.int8.ort"], ["model.int8.onnx"], ["model.int8.onnx"]
    ]  # fmt: skip


def test_a_gpu_serves_only_what_was_verified_on_it(package: Path) -> None:
    applied, profile = contract(), ServingProfile(device="cuda")
    verdict = Verdict(applied.hash, 0, {}, package=package_digest(package), model=FeatureVerdict(1, 0, 0.0))
    assert approve(package, verdict, applied, ServingProfile(), tables={}, deployed_at=0).device == "cpu"
    with pytest.raises(GateFailed, match=r"expected model\.int8\.onnx in ONNX Runtime on cuda"):
        approve(package, verdict, applied, profile, tables={}, deployed_at=0)
    verdict.files["model.int8.onnx in ONNX Runtime on cuda"] = FeatureVerdict(1, 0, 0.0)
    assert approve(package, verdict, applied, profile, tables={}, deployed_at=0).device == "cuda"


@pytest.mark.parametrize(("share", "cpu", "gpu"), [(0.0, True, True), (0.9, False, True), (1.1, False, False)])
def test_only_a_gpu_may_differ_by_the_tolerance_of_the_file(package: Path, share: float, cpu: bool, gpu: bool) -> None:
    opened = open_package(package)
    golden, (variant,) = read_golden(opened), ServedRuntime(ServingProfile(device="cuda")).files(opened.manifest)
    assert variant.tolerance > 2 * replay.GOLDEN_TOLERANCE
    step = np.float32(share * variant.tolerance)
    moved = [
        {name: tensor.array + step for name, tensor in case.outputs[variant.file].items()} for case in golden.cases
    ]
    sides: dict[ServingDevice, bool] = {"cpu": cpu, "cuda": gpu}
    for device, holds in sides.items():
        with nullcontext() if holds else pytest.raises(PackageError, match="does not reproduce"):
            replay.require_reproduced(golden, opened.manifest, variant, moved, device=device)
