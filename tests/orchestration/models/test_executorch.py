"""Packages with a program of ExecuTorch: exported, verified in that runtime and in others, and damaged."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isthmus.distill.distillation import DistillationReport
from isthmus.distill.export.export import ExportReport, export
from isthmus.distill.export.ladder import compare_forms
from isthmus.distill.restore import create_task, restore
from isthmus.distill.runtimes.executorch.export import convert_student
from isthmus.distill.runtimes.executorch.process import LIBRARIES, ExecuTorchProgram
from isthmus.distill.runtimes.network import portable_part, run_program
from isthmus.distill.runtimes.process import ProgramRejected
from isthmus.features.errors import ConfigurationError, DependencyError, GateFailed
from isthmus.orchestration.runtimes.programs import ProgramRuntime
from isthmus.orchestration.runtimes.web import WebRuntime
from isthmus.package.golden import read_golden
from isthmus.package.inspect import Inspection, OnnxRuntime, Runtime, inspect
from isthmus.package.manifest import TensorInfo as Described
from isthmus.package.manifest import open_package, read_package
from tests.distill import kinds
from tests.distill.conftest import SERVING
from tests.distill.packages import contract, resum
from tests.distill.support import check_package, material, run, training_set
from tests.orchestration.models.test_packages import HEAVY, verify
from tests.serving.support import make_package as package_of_rows

# Lowering a graph to ExecuTorch takes a quarter of a minute of a free core, once before training and once after.
pytestmark = pytest.mark.timeout(900)

FILE, QUANTIZED = "model.fp32.pte", "model.int8.pte"
RUNTIMES = ("onnxruntime", "executorch")
CONTRACT = contract()
OWN: dict[str, Any] = {
    "contract": CONTRACT.hash, "task": "tests.distill.kinds:Classes", "seeds": 1, "epochs": 1, "runtimes": RUNTIMES,
}  # fmt: skip
FP32 = replace(SERVING, precision="fp32")
ROWS = 600


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> DistillationReport:
    notes: list[str] = []
    report = run(tmp_path_factory.mktemp("executorch"), training_set(ROWS), notes=notes, **OWN)
    assert not any("no model for executorch" in note for note in notes)
    return report


@pytest.fixture(scope="module")
def exported(trained: DistillationReport, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    return again(trained.path, tmp_path_factory.mktemp("packages"))


def again(model: Path, packages: Path, **changes: Any) -> ExportReport:
    return export(
        material(training_set(ROWS), **{**OWN, **changes}), model, packages, contract=json.loads(CONTRACT.dumps()),
        profile=FP32, cache=model.parents[1] / "cache",
    )  # fmt: skip


@pytest.mark.accept
def test_programs_are_two_more_model_files(exported: ExportReport, trained: DistillationReport) -> None:
    assert exported.left_out == {}
    manifest = read_package(exported.path)
    program = manifest.variant("fp32", "pte")
    assert (program.file, program.most, program.bytes) == (FILE, {"N": 1}, (exported.path / FILE).stat().st_size)
    assert exported.worst[FILE] == program.worst <= 1e-5
    assert program.quality == manifest.variant("fp32").quality
    quantized = manifest.variant("int8", "pte")
    assert (quantized.file, quantized.most) == (QUANTIZED, {"N": 1})
    assert quantized.tolerance == pytest.approx(0.05, rel=1e-5)
    assert 1e-4 < quantized.worst <= quantized.tolerance
    assert quantized.quality["accuracy"] == pytest.approx(program.quality["accuracy"], abs=0.05)
    for case in read_golden(open_package(exported.path)).cases:
        theirs, ours = (case.outputs[file]["logits"].array for file in (FILE, "model.fp32.onnx"))
        np.testing.assert_allclose(theirs, ours, atol=1e-5)
    compared = check_package(material(training_set(ROWS), **OWN), open_package(exported.path), trained.path, rows=50)
    assert {(one.compared, one.differing) for one in compared.values()} == {(50 + 16, 0)}
    assert {FILE, QUANTIZED} <= compared.keys()


@pytest.mark.accept
@pytest.mark.slowest
def test_another_process_makes_the_same_bytes(
    exported: ExportReport, trained: DistillationReport, tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.orchestration.models.test_executorch import again\n"
        "if __name__ == '__main__': print(again(*map(Path, sys.argv[1:])).digest)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(trained.path), str(tmp_path)], cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[-1] == exported.digest


@pytest.mark.accept
def test_it_is_verified_in_its_runtime_and_named_in_others(exported: ExportReport) -> None:
    shown = verify(exported.path, "--runtime", "executorch", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    told = json.loads(shown.stdout)
    assert list(told["worst"]) == [FILE, QUANTIZED]
    assert max(told["worst"].values()) <= 1e-6
    found = {check["check"]: check["found"] for check in told["checks"]}
    assert found["model.int8.ort"] == "not run: ort format does not run in ExecuTorch"
    told = json.loads(verify(exported.path, "--json").stdout)
    assert len(told["worst"]) == 4
    found = {check["check"]: check["found"] for check in told["checks"]}
    assert found[FILE] == "not run: pte format does not run in ONNX Runtime"


@pytest.mark.accept
def test_every_rung_to_a_phone_holds(exported: ExportReport, trained: DistillationReport) -> None:
    runtimes: dict[str, Callable[[], Runtime]] = {
        "ONNX Runtime": OnnxRuntime,
        "onnxruntime-web": WebRuntime,
        "ExecuTorch": partial(ProgramRuntime, "pte"),
    }
    ladder = compare_forms(material(training_set(ROWS), **OWN), open_package(exported.path), trained.path, runtimes)
    rungs = {(rung.form, rung.runtime): rung for rung in ladder.rungs}
    assert list(rungs)[:2] == [("student", "torch"), ("exported program", "torch")]
    assert {rung.holds for rung in ladder.rungs} == {True}
    for place in (("exported program", "torch"), ("model.fp32.ort", "onnxruntime-web"), (FILE, "ExecuTorch")):
        worst = rungs[place].worst
        assert worst is not None
        assert worst <= 1e-5
    assert rungs[QUANTIZED, "ExecuTorch"].tolerance == pytest.approx(0.05, rel=1e-5)


def test_a_package_without_a_program_is_refused_by_its_runtime(tmp_path: Path) -> None:
    shown = verify(package_of_rows(tmp_path / "package"), "--runtime", "executorch")
    assert shown.returncode == 1
    assert "has no model file for ExecuTorch, only model.int8.ort; expected at least one" in shown.stderr


@pytest.mark.accept
def test_where_it_is_missing_the_command_that_installs_it_is_named(exported: ExportReport, tmp_path: Path) -> None:
    (tmp_path / "executorch.py").write_text("raise ImportError('of another release')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    shown = verify(exported.path, "--runtime", "executorch", PYTHONPATH=path)
    assert shown.returncode == 3
    assert "ExecuTorch: cannot be imported (of another release). Run pip install --no-deps execu" in shown.stderr


@pytest.mark.accept
def test_what_is_asked_for_and_not_installed_is_said_before_the_first_step(
    tmp_path: Path, trained: DistillationReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast(dict[str, str], LIBRARIES.pins), "executorch", "0.0.1")
    monkeypatch.setitem(cast(dict[str, str], LIBRARIES.pins), "nothing-such", "7")
    for step in (lambda: run(tmp_path, training_set(ROWS), **OWN), lambda: again(trained.path, tmp_path)):
        with pytest.raises(ConfigurationError, match=r"executorch, but .* is installed; expected 0.0.1") as caught:
            step()
        assert "needs nothing-such, which is not installed; expected 7" in str(caught.value)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigurationError, match="runtimes"):
        run(tmp_path, training_set(ROWS), **{**OWN, "runtimes": ("executorch",)})


@pytest.mark.accept
def test_the_readme_runs(exported: ExportReport) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (exported.path / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "executorch" in block]
    wrong = code.replace("<= 1e-5", "> 1e-5")
    both = f"{code}\ntry:\n    exec({wrong!r})\nexcept AssertionError:\n    print('not reproduced')"
    done = subprocess.run([sys.executable, "-c", both], cwd=exported.path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["not reproduced"]), done.stderr


def inspected(package: Path) -> Inspection:
    return inspect(package, runtime=ProgramRuntime("pte"))


@pytest.mark.accept
@pytest.mark.parametrize("how", ["flipped", "cut", "garbage", "nothing"])
def test_a_damaged_program_is_refused(exported: ExportReport, tmp_path: Path, how: str) -> None:
    package = tmp_path / exported.path.name
    shutil.copytree(exported.path, package)
    file, whole = package / FILE, (exported.path / FILE).read_bytes()
    draw = random.Random(5)
    changed = {
        "flipped": bytes([*whole[:1000], whole[1000] ^ 4, *whole[1001:]]), "cut": whole[: len(whole) // 2],
        "garbage": draw.randbytes(len(whole)), "nothing": b"",
    }[how]  # fmt: skip
    file.write_bytes(changed)
    (found,) = [check for check in inspected(package).checks if check.error]
    assert (found.subject, "SHA-256" in found.finding) == ("files and manifest", True)
    if how == "flipped":
        return  # of a forger, the golden cases are what finds it
    resum(package)
    (found,) = [check for check in inspected(package).checks if check.error]
    assert (found.subject, "ExecuTorch refuses it (" in found.finding) == (FILE, True), found


@pytest.mark.accept
@pytest.mark.slowest
def test_a_program_of_another_student_or_another_shape_is_refused(exported: ExportReport, tmp_path: Path) -> None:
    manifest = read_package(exported.path)
    model, fed = (exported.path / FILE).read_bytes(), {"x": np.zeros((2, 2), np.float32)}
    with ExecuTorchProgram(model, manifest.tensors, manifest.outputs, {"N": 1}) as program:
        assert program.ask(fed)["logits"].shape == (2, 5)
        with pytest.raises(ProgramRejected, match="inputs have 0 rows"):
            program.ask({"x": fed["x"][:0]})
        with pytest.raises(ProgramRejected, match="set_inputs"):
            program.ask({"x": np.zeros((2, 3), np.float32)})
        assert program.ask(fed)["logits"].shape == (2, 5)
    for tensor, most in ((manifest.tensors[0], {}), (Described("x", "int64", ("N", 2)), {"N": 1})):
        with pytest.raises(ProgramRejected, match="its inputs are float"):
            ExecuTorchProgram(model, [tensor], manifest.outputs, most)
    package = tmp_path / exported.path.name
    shutil.copytree(exported.path, package)
    golden = json.loads((package / "golden.json").read_bytes())
    for case in golden["cases"]:
        case["outputs"][FILE] = case["outputs"]["model.int8.onnx"]
    (package / "golden.json").write_text(json.dumps(golden))
    resum(package)
    (found,) = [check for check in inspected(package).checks if check.error]
    assert (found.subject, "does not reproduce its golden outputs" in found.finding) == (FILE, True)


@pytest.mark.accept
@pytest.mark.slowest
def test_a_program_that_is_too_coarse_is_left_out(tmp_path: Path) -> None:
    task = {"task": "tests.distill.kinds:Coarse"}
    trained = run(tmp_path, training_set(ROWS), **{**OWN, **task, "runtimes": ("onnxruntime",)})
    report = again(trained.path, tmp_path / "packages", **task)
    assert report.left_out.keys() == {"int8", QUANTIZED}
    assert re.match(rf"{QUANTIZED}: (golden )?row \d+", report.left_out[QUANTIZED])
    (limit,) = re.findall(r"expected at most ([\d.e-]+\d)", report.left_out[QUANTIZED])
    assert 1e-12 <= float(limit) < 1e-6  # the declared limit, or two float32 steps at the number
    files = [variant.file for variant in read_package(report.path).variants]
    assert files == ["model.fp32.onnx", "model.fp32.ort", FILE]


class Odd(nn.Module):
    """Computes what ExecuTorch has no operator for."""

    def forward(self, numbers: Tensor) -> Tensor:
        found: Tensor = torch.linalg.svdvals(numbers[:, :, None] * numbers[:, None, :])
        return found


class Foreign(kinds.Classes):
    """Its graph is no module that ExecuTorch can have."""

    def network(self, _student: nn.Module) -> nn.Module:
        return Odd()


@pytest.mark.accept
def test_what_a_program_cannot_have_is_named(trained: DistillationReport) -> None:
    table = training_set(ROWS)
    task, student = create_task(material(table, **OWN)), restore(material(table, **OWN), trained.path).student
    row = np.arange(1)
    outputs = [Described("logits", "float", ("N", 5))]
    with pytest.raises(GateFailed, match=r"dynamic size P has no limit; .*max_sizes"):
        convert_student(portable_part(task, student, row, [Described("x", "float", ("N", "P"))], outputs))
    with pytest.raises(GateFailed, match="tensor x has no rows as its first axis"):
        convert_student(portable_part(task, student, row, [Described("x", "float", (7, 2))], outputs))
    foreign = Foreign(task.material)
    with pytest.raises(GateFailed, match=r"ExecuTorch cannot convert the student: .*svd"):
        convert_student(portable_part(foreign, student, row, [Described("x", "float", ("N", 2))], outputs))


class Placed(nn.Module):
    """Adds whole numbers, and looks up the rows of a table by them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.arange(20.0).reshape(4, 5) / 20), nn.Linear(2, 5)

    def forward(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.layer(numbers) + self.table[(numbers > 0).long().sum(1) + 1]
        return found


class Looking(kinds.Classes):
    """Whole numbers stay whole in INT8."""

    def network(self, _student: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return Placed().requires_grad_(requires_grad=False).eval()


@pytest.mark.accept
def test_places_stay_whole_numbers_in_int8() -> None:
    task = Looking(material(training_set(ROWS), **OWN))
    tensors, outputs = ([Described(name, "float", ("N", width))] for name, width in (("x", 2), ("logits", 5)))
    of = portable_part(task, task.student(), np.arange(1), tensors, outputs)
    program = convert_student(of, np.arange(20))
    fed = {"x": np.array([[0.3, 0.5], [0.9, -0.1], [-0.2, -0.4]], np.float32)}
    expected = task.network(nn.Identity())(torch.from_numpy(fed["x"])).numpy()
    with run_program(ExecuTorchProgram, program, tensors, outputs) as run:
        found = run(fed)["logits"]
    np.testing.assert_allclose(found, expected, atol=0.1)


class Wide(kinds.Classes):
    """Takes sixty-four MiB for an answer."""

    def network(self, _student: nn.Module) -> nn.Module:
        class Network(nn.Module):
            def forward(self, numbers: Tensor) -> Tensor:
                wide = numbers[:, :1, None].expand(1, 4096, 4096) * torch.arange(4096.0)
                return wide.cumsum(2)[:, 0, :5] + wide.sum((1, 2))

        return Network().eval()


@pytest.mark.accept
def test_a_program_takes_no_more_memory_than_it_may() -> None:
    task = Wide(material(training_set(ROWS), **OWN))
    tensors, outputs = ([Described(name, "float", ("N", width))] for name, width in (("x", 2), ("logits", 5)))
    program = convert_student(portable_part(task, task.student(), np.arange(1), tensors, outputs))
    fed = {"x": np.ones((1, 2), np.float32)}
    with ExecuTorchProgram(program.model, tensors, outputs, program.max_sizes) as running:
        assert running.ask(fed)["logits"].shape == (1, 5)
    with (
        pytest.raises(ProgramRejected),
        ExecuTorchProgram(program.model, tensors, outputs, program.max_sizes, memory=32 << 20) as running,
    ):
        running.ask(fed)


@pytest.mark.parametrize(("does", "words"), [
    ("answer(b'abcde')", r"its process sent an unreadable message, .*; its stderr ends with: a note of the library$"),
    ("answer(b'\\x81\\xa5error\\xa1\\xff')", "its process sent an unreadable message"),
    ("os.write(3, b'\\xff' * 8)", r"message, an answer of 18,446,744,073,709,551,615 bytes; its stderr ends with"),
    ("os.write(3, (9).to_bytes(8, 'little') + b'abc')", r"its process exited with 7; its stderr ends with: a note"),
    ("os.kill(os.getpid(), 6)", "its process was killed by SIGABRT; its stderr ends with: a note of the library"),
    ("print('x' * 2**24, file=sys.stderr, flush=True)", "its process was killed|exited with"),
])  # fmt: skip
def test_what_a_process_says_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str, words: str
) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, sys\n"
        "def answer(data): os.write(3, len(data).to_bytes(8, 'little') + data)\n"
        "print('a note of the library', file=sys.stderr, flush=True)\n"
        f"try:\n    {does}\nfinally:\n    os._exit(7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(ProgramRejected, match=words) as caught:
        ExecuTorchProgram(b"", [], [], {})
    assert len(str(caught.value)) < 600


def test_an_answer_that_is_no_tensor_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = {"inputs": [], "outputs": [{"element": "float", "shape": [1]}]}
    answers = [[], [{"element": "float", "shape": [3], "data": b"1234"}], [{"element": "none", "shape": [1]}]]
    outputs = [Described("logits", "float", (1,))]
    for answer in answers:
        said = [msgspec.msgpack.encode(one) for one in (told, {"answers": answer})]
        (tmp_path / "torch.py").write_text(
            f"import os\nfor data in {said!r}: os.write(3, len(data).to_bytes(8, 'little') + data)\nos._exit(0)\n"
        )
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        program = ExecuTorchProgram(b"", [], outputs, {})
        with program, pytest.raises(ProgramRejected, match="its process sent an unreadable message"):
            program._ask({})


def test_a_process_answers_some_of_the_rows_and_no_more_than_were_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    described = {"inputs": [], "outputs": [{"element": "float", "shape": [1]}]}
    fed = {"x": np.zeros(3, np.float32)}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    for counts, words in (
        ((2, 1), ""),
        ((2, 2), "returned 2 rows instead of 1"),
        ((0,), "returned 0 rows instead of 3"),
    ):
        answers = [{"element": "float", "shape": [count], "data": bytes(4 * count)} for count in counts]
        messages = [msgspec.msgpack.encode(each) for each in (described, *({"answers": [each]} for each in answers))]
        (tmp_path / "torch.py").write_text(
            f"import os\nfor data in {messages!r}: os.write(3, len(data).to_bytes(8, 'little') + data)\nos._exit(0)\n"
        )
        with ExecuTorchProgram(b"", [], [Described("logits", "float", ("N",))], {"N": 1}) as program:
            if words:
                with pytest.raises(ProgramRejected, match=words):
                    program.ask(fed)
            else:
                assert program.ask(fed)["logits"].shape == (3,)


def test_the_process_is_not_there_without_its_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('nowhere')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(DependencyError, match="nowhere"):
        ExecuTorchProgram(b"", [], [], {})
    assert "torch" in HEAVY  # `verify` shows that the process that asks needs none of it
