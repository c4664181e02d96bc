"""The head in a package: its golden rows make the recorded tensors of the core, or nobody takes the package."""

import hashlib
import json
import shutil
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from isthmus.distill.distillation import DistillationReport
from isthmus.distill.export.export import ExportReport
from isthmus.distill.export.package import contents, package_bytes, readme, write_package
from isthmus.distill.restore import restore
from isthmus.features.errors import PackageError
from isthmus.package.checksums import README
from isthmus.package.clients import CLIENTS, READERS, sources
from isthmus.package.featurizer.form import HEAD
from isthmus.package.golden import TensorBytes, read_golden
from isthmus.package.inspect import inspect
from isthmus.package.manifest import Variant, open_package
from tests.distill.packages import resum, rewritten
from tests.distill.support import material

PROGRAM = "core.fp32.tflite"


@pytest.fixture(scope="module")
def package(
    exported: ExportReport, trained: DistillationReport, table: pa.Table, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """That of a student, with a head and a file for its core, which no test opens."""
    whole = open_package(exported.path)
    restored_student = restore(material(table), trained.path)
    task, student = restored_student.task, restored_student.student
    core = task.core(student)
    assert core is not None
    assert core.head is not None
    model = whole.manifest.variants[0]
    program = Variant(
        PROGRAM, "fp32", "tflite", 4, "", model.tolerance, model.worst, model.quality, {"N": 1}, core=True
    )
    files = {name: whole.files.read(name) for name in whole.files.sums}
    files |= {PROGRAM: b"core", HEAD: core.head(), **sources(READERS)}
    manifest = msgspec.structs.replace(
        whole.manifest,
        core=tuple(core.tensors),
        variants=(
            *whole.manifest.variants,
            msgspec.structs.replace(program, sha256=hashlib.sha256(files[PROGRAM]).hexdigest()),
        ),
        files={**whole.manifest.files, HEAD: "what feeds the core", **READERS},
    )
    golden = read_golden(whole)
    cases = tuple(
        msgspec.structs.replace(
            case,
            outputs={**case.outputs, PROGRAM: case.outputs[model.file]},
            core={name: TensorBytes.of(tensor) for name, tensor in made.core.items()},
        )
        for case, made in zip(golden.cases, task.cases(student), strict=True)
    )
    golden = msgspec.structs.replace(golden, cases=cases)
    assert package_bytes(files, "fp32") == sum(
        len(data) for name, data in files.items() if ".int8." not in name and name not in {README, *READERS, *CLIENTS}
    )
    made = contents(manifest, json.loads(files["contract.json"]), golden, files)
    return write_package(tmp_path_factory.mktemp("heads"), "late", made)


def test_the_golden_rows_make_the_tensors_of_the_core(package: Path) -> None:
    checks = {check.subject: check for check in inspect(package).checks}
    assert checks[HEAD].error is None
    assert checks[HEAD].finding == "21 rows reproduce the tensors of the core bit for bit"


def test_the_readme_says_how_a_core_is_fed(package: Path) -> None:
    files = {file.name: file.read_bytes() for file in package.iterdir()}
    opened = open_package(package)
    text = readme(opened.manifest, json.loads(files["contract.json"]), read_golden(opened), files)
    assert (package / "README.md").read_text(encoding="utf-8") == text
    for name in READERS:
        assert f"`{name}`" in text


WRONG = {
    "another constant": (lambda form: form["constants"][0][1].__setitem__(0, "3f000000"), "do not reproduce the"),
    "another version": (lambda form: form.update(version=7), "version 7; expected 1"),
    "another input": (
        lambda form: form["inputs"][0].__setitem__(0, "nobody"),
        "reads nobody as a Float32; expected the inputs of the manifest",
    ),
    "fewer outputs": (lambda form: form["outputs"].pop(), "do not reproduce the recorded tensor places"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_head_that_makes_other_tensors_is_refused(package: Path, how: str, tmp_path: Path) -> None:
    change, message = WRONG[how]
    wrong = Path(shutil.copytree(package, tmp_path / "wrong"))
    rewritten(HEAD, change)(wrong)
    checks = {check.subject: check for check in inspect(wrong).checks}
    assert isinstance(checks[HEAD].error, PackageError)
    assert message in str(checks[HEAD].error)
    # What else is wrong is the contract, which is none.
    assert [name for name, check in checks.items() if check.error] == ["contract.json", HEAD]


def test_a_head_without_a_core_is_refused(exported: ExportReport, package: Path, tmp_path: Path) -> None:
    wrong = Path(shutil.copytree(exported.path, tmp_path / "wrong"))
    shutil.copy(package / HEAD, wrong)
    rewritten("manifest.json", lambda manifest: manifest["files"].update({HEAD: "what feeds nothing"}))(wrong)
    resum(wrong)
    checks = {check.subject: check for check in inspect(wrong).checks}
    assert "do not reproduce the recorded tensor numbers" in str(checks[HEAD].error)
