"""A package's golden cases in another process: this Python, and what stands for a shell on another machine."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.features.errors import DependencyError, IsthmusError, PackageError, RequestError
from isthmus.package.checksums import GOLDEN
from isthmus.package.device import check
from isthmus.package.device.target import CHECK, DeviceRuntime, Target
from isthmus.package.golden import read_golden
from isthmus.package.inspect import inspect
from isthmus.package.manifest import open_package
from tests.distill.packages import of_tensors, resum
from tests.repository.pages import ROOT

HERE = Target.parse(sys.executable)
AARCH64 = ROOT / ".venv" / "aarch64"  # `make aarch64`


def test_every_kind_of_tensor_goes_to_a_target_and_back(tmp_path: Path) -> None:
    package = open_package(of_tensors(tmp_path))
    golden = read_golden(package)
    for variant in package.manifest.variants:
        processor, result = HERE.run(package, variant, golden.cases, calls=25)
        (case,) = result.cases
        assert case.outputs == golden.cases[0].outputs[variant.file]
        assert (case.values, case.differing, case.worst) == (4 * 7, 0, 0.0)
        assert 20 <= result.calls <= 25
        assert 0 < result.p50_us <= result.p99_us
        assert result.load_ms > 0
        assert processor.machine == os.uname().machine


def test_the_script_alone_checks_a_folder(tmp_path: Path) -> None:
    folder = of_tensors(tmp_path)
    case = json.loads((folder / GOLDEN).read_text())
    outputs = case["cases"][0]["outputs"]["model.fp32.ort"]
    data = np.array(outputs["double_out"]["data"])
    outputs["double_out"] = check.plain(np.array([[0.1, 0.1], [1e300, np.nextafter(1e300, 2e300)]]))
    assert outputs["double_out"]["data"] != data
    (folder / GOLDEN).write_text(json.dumps(case))
    done = subprocess.run(
        [sys.executable, str(CHECK), str(folder), "--calls", "0"], capture_output=True, text=True, check=True
    )
    first, *files = map(json.loads, done.stdout.splitlines())
    assert first["processor"]["onnxruntime"]
    (right,), (wrong,) = (file["cases"] for file in files)
    assert right == {"values": 28, "differing": 0, "worst": 0.0, "outputs": {}}
    assert wrong == {"values": 28, "differing": 1, "worst": pytest.approx(1e284, rel=1), "outputs": {}}


@pytest.mark.parametrize(
    ("expected", "actual", "differing", "worst"),
    [
        ([1.0, 2.0], [1.0, 2.5], 1, 0.5),
        ([0.0], [-0.0], 1, 0.0),
        ([np.nan, 1], [-np.nan, 1], 1, 0.0),  # processors differ in the sign of a NaN
        ([np.nan], [1.0], 1, None),
        ([np.inf], [np.inf], 0, 0.0),
        ([np.inf], [-np.inf], 1, None),
        ([1.0], [[1.0]], 1, None),
        (np.array(["a"], object), np.array(["b"], object), 1, None),
        (np.array(["a"], object), np.array(["a"], object), 0, 0.0),
    ],
)
def test_bits_are_compared(expected: Any, actual: Any, differing: int, worst: float | None) -> None:
    pair = np.asarray(expected), np.asarray(actual)
    assert check.compare([pair]) == {"values": pair[0].size, "differing": differing, "worst": worst}


@pytest.mark.parametrize("text", ["", "'", "ssh", "ssh:", "ssh:-oProxyCommand=touch", "adb:", "adb:-H"])
def test_a_target_must_name_a_machine(text: str) -> None:
    with pytest.raises(RequestError, match="ssh:HOST, adb, adb:SERIAL, or the command of a Python"):
        Target.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/no/python", "/no/python cannot be started"),
        ("ssh:phone", "ssh cannot be started"),
        ("adb", "adb cannot be started"),
        (f"{sys.executable} -I -S", "exited with 1.*No module named 'numpy'.*pip install numpy onnxruntime"),
        ("/bin/sh", "exited with"),
        ("/bin/echo {}", "exited with 0"),
    ],
)
def test_a_target_that_cannot_run_is_named(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    package = open_package(of_tensors(tmp_path))
    with pytest.raises(DependencyError, match=f"target {re.escape(text)}: (?s:.*)({message})"):
        Target.parse(text).run(package, package.manifest.variants[0], read_golden(package).cases)


def test_an_unreadable_answer_is_an_error(tmp_path: Path) -> None:
    strange = tmp_path / "python"
    strange.write_text("#!/bin/sh\ncat >/dev/null\necho '{\"processor\": 1}'\necho '{\"file\": 2}'\n")
    strange.chmod(0o755)
    package = open_package(of_tensors(tmp_path))
    with pytest.raises(DependencyError, match="its answer cannot be read"):
        Target.parse(str(strange)).run(package, package.manifest.variants[0], read_golden(package).cases)


@pytest.mark.parametrize(
    ("target", "program", "given"),
    [("ssh:me@phone", "ssh", "-o BatchMode=yes -- me@phone"), ("adb:123", "adb", "-s 123 shell -T"),
     ("adb", "adb", "shell -T")],
)  # fmt: skip
def test_the_shell_of_another_machine_gets_one_quoted_line(
    target: str, program: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(given.split())
    connect = tmp_path / program
    connect.write_text(f'#!/bin/sh\n[ "$(echo "$@" | cut -d " " -f 1-{count})" = "{given}" ] || exit 255\n'
                       f'shift {count}\necho "Welcome to {{this}} phone"\nexec /bin/sh -c "$*"\n')  # fmt: skip
    connect.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    spaced = tmp_path / "a $HOME; python"
    spaced.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    spaced.chmod(0o755)
    package = of_tensors(tmp_path)
    inspection = inspect(package, runtime=DeviceRuntime(Target.parse(f"{target} '{spaced}'")))
    inspection.require()
    assert inspection.worst == {"model.fp32.onnx": 0.0, "model.fp32.ort": 0.0}


def test_a_working_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    inspect(of_tensors(tmp_path), runtime=DeviceRuntime(HERE)).require()


@pytest.mark.parametrize("damage", ["outputs", "file"])
def test_a_damaged_package_is_the_package_s_fault(damage: str, tmp_path: Path) -> None:
    folder = of_tensors(tmp_path)
    if damage == "file":
        (folder / "model.fp32.ort").write_bytes(b"no model")
    else:
        golden = json.loads((folder / GOLDEN).read_text())
        golden["cases"][0]["outputs"]["model.fp32.ort"]["float_out"] = check.plain(np.full((2, 2), 0.2, np.float32))
        (folder / GOLDEN).write_text(json.dumps(golden))
    resum(folder)
    failed = inspect(folder, runtime=DeviceRuntime(HERE))
    (error,) = (found.error for found in failed.checks if found.error is not None)
    assert isinstance(error, PackageError)
    assert "model.fp32.ort" in error.where
    assert ("refuses it" if damage == "file" else "does not reproduce its golden outputs") in str(error)


def test_a_target_that_dies_at_a_model_is_not_blamed(tmp_path: Path) -> None:
    dying = tmp_path / "python"
    texts = dict.fromkeys(("machine", "processor", "system", "python", "numpy", "onnxruntime"), "1.26.0")
    first = json.dumps({"processor": {**texts, "cores": 1}})
    dying.write_text(f"#!/bin/sh\nhead -c 1 >/dev/null\necho '{first}'\nkill -SEGV $$\n")
    dying.chmod(0o755)
    package = open_package(of_tensors(tmp_path))
    with pytest.raises(IsthmusError, match="was ended by SIGSEGV") as caught:
        Target.parse(str(dying)).run(package, package.manifest.variants[0], read_golden(package).cases)
    assert isinstance(caught.value, PackageError)
    assert "ONNX Runtime 1.26.0 on" in str(caught.value)
    assert "Install on it at least the release that the package's README names" in str(caught.value)


@pytest.mark.accept
def test_the_golden_cases_hold_on_an_emulated_aarch64(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64-static")
    if emulator is None or not AARCH64.exists():
        pytest.skip("no AArch64 here: install qemu-user-static and debootstrap, and run `make aarch64`")
    target = Target.parse(f"{emulator} -L {AARCH64} {AARCH64}/usr/bin/python3.11")
    earlier = ROOT / "tests" / "fixtures" / "v0_1" / "state" / "packages" / "late_order-9eb1d2f3ea89"
    for folder in (of_tensors(tmp_path), earlier):
        package = open_package(folder)
        for variant in DeviceRuntime(target).files(package.manifest):
            processor, result = target.run(package, variant, read_golden(package).cases)
            assert processor.machine == "aarch64"
            assert [case.differing for case in result.cases] == [0] * len(result.cases)
