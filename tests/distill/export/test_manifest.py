import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.distill.export.export import ExportReport
from isthmus.features.errors import PackageError
from isthmus.package.checksums import SUMS
from isthmus.package.golden import read_golden
from isthmus.package.manifest import open_package, package_digest, read_package


@pytest.fixture
def package(exported: ExportReport, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported.path, tmp_path / "package"))


def rewrite(package: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Alters a file and its sum, as someone would who signs what they altered."""
    data = change((package / name).read_bytes())
    (package / name).write_bytes(data)
    lines = (package / SUMS).read_text(encoding="utf-8").splitlines()
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}" if line.endswith(f"  {name}") else line for line in lines]
    (package / SUMS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def swap(package: Path) -> None:
    shutil.copy(package / "model.fp32.ort", package / "model.int8.ort")


def outside(package: Path) -> None:
    (package.parent / "other").write_bytes(b"")
    with (package / SUMS).open("a", encoding="utf-8") as sums:
        sums.write(f"{hashlib.sha256().hexdigest()}  ../other\n")


def link(package: Path) -> None:
    target = package.parent / "model"
    (package / "model.fp32.ort").rename(target)
    (package / "model.fp32.ort").symlink_to(target)


def unlisted(package: Path) -> None:
    sums = (package / SUMS).read_text(encoding="utf-8").splitlines(keepends=True)
    (package / SUMS).write_text("".join(line for line in sums if "golden" not in line), encoding="utf-8")
    (package / "golden.json").unlink()


def scalar(manifest: bytes) -> bytes:
    changed = json.loads(manifest)
    changed["outputs"][0]["shape"], changed["classes"] = [], ["no", "yes"]
    return json.dumps(changed).encode()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit flip": (lambda p: flip(p / "model.int8.ort"), r"model\.int8\.ort: SHA-256 .*; expected"),
    "truncated": (lambda p: (p / "model.int8.onnx").write_bytes(b"\x08"), r"model\.int8\.onnx: SHA-256"),
    "swapped": (swap, r"model\.int8\.ort: SHA-256"),
    "golden altered": (lambda p: flip(p / "golden.json"), r"golden\.json: SHA-256"),
    "missing file": (lambda p: (p / "model.fp32.onnx").unlink(), r"model\.fp32\.onnx: missing"),
    "missing sums": (lambda p: (p / SUMS).unlink(), "SHA256SUMS: cannot be read; expected a package folder"),
    "no folder": (lambda p: shutil.rmtree(p), "SHA256SUMS: cannot be read"),
    "extra model": (lambda p: (p / "model.ort").write_bytes(b""), r"model\.ort: not listed"),
    "extra folder": (lambda p: (p / "more").mkdir(), "more: not a plain file"),
    "link": (link, r"model\.fp32\.ort: not a plain file"),
    "outside": (outside, r"line 13: \.\./other leaves the package folder"),
    "garbled sums": (lambda p: (p / SUMS).write_text("zz  manifest.json\n", encoding="utf-8"), "line 1: 'zz  man"),
    "not text": (lambda p: (p / SUMS).write_bytes(b"\xff\xfe"), "SHA256SUMS: cannot be read"),
    "listed twice": (lambda p: (p / SUMS).write_bytes((p / SUMS).read_bytes() * 2), "is listed twice"),
    "golden unlisted": (unlisted, r"golden\.json: missing; expected listed"),
    "version": (
        lambda p: rewrite(p, "manifest.json", lambda d: d.replace(b'"format_version": 2', b'"format_version": 9')),
        r"manifest\.json: format version 9; expected 2. Use the release",
    ),
    "not JSON": (lambda p: rewrite(p, "manifest.json", lambda d: d[:-20]), r"manifest\.json: .*expected a manifest"),
    "contract not JSON": (lambda p: rewrite(p, "contract.json", lambda _: b"{"), r"contract\.json: "),
    "unknown type": (
        lambda p: rewrite(p, "manifest.json", lambda d: d.replace(b'"Float32"', b'"Float16"')),
        "input distance has type Float16",
    ),
    "classes of nothing": (lambda p: rewrite(p, "manifest.json", scalar), "names 2 classes; expected one output"),
    "no rounding": (
        lambda p: rewrite(
            p, "manifest.json", lambda d: d.replace(b'"format": "onnx"', b'"format": "onnx", "rounding": -1')
        ),
        r"model\.fp32\.onnx has a rounding of -1\.0; expected a finite number above 0",
    ),
    "model resigned": (lambda p: rewrite(p, "model.int8.ort", lambda d: d[:-1]), r"manifest\.json: model\.int8\.ort"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_package_is_refused_with_its_reason(package: Path, damage: str) -> None:
    read_package(package)
    apply, message = DAMAGE[damage]
    apply(package)
    with pytest.raises(PackageError, match=message):
        read_package(package)


def first(golden: dict[str, Any]) -> dict[str, Any]:
    """The answers of one file in the first case."""
    return golden["cases"][0]["outputs"]["model.fp32.onnx"]  # type: ignore[no-any-return]


GOLDEN_DAMAGE: dict[Callable[[dict[str, Any]], object], str] = {
    lambda g: first(g)["probability"].update(shape=[15], data=first(g)["probability"]["data"][:80]): "without an out",
    lambda g: first(g)["probability"].update(shape=[7]): "cannot reshape",
    lambda g: first(g)["probability"].update(element="half"): "elements of kind half",
    lambda g: first(g)["probability"].update(data="?"): "base64",
    lambda g: first(g).update(more=first(g)["probability"]): "an incomplete case",
    lambda g: g["cases"][1]["tensors"].popitem(): "an incomplete case",
    lambda g: g["cases"][1].pop("rows"): "an incomplete case",
    lambda g: g["cases"][1]["rows"][0].pop(): "rows of unequal length",
    lambda g: g.update(inputs=["x", *g["inputs"][1:]]): "no input carrier",
    lambda g: g.update(cases=[]): "no case",
}


def test_golden_rows_that_do_not_fit(package: Path) -> None:
    whole = (package / "golden.json").read_bytes()
    for change, message in GOLDEN_DAMAGE.items():
        golden = json.loads(whole)
        change(golden)
        rewrite(package, "golden.json", lambda _: json.dumps(golden).encode())  # noqa: B023 - called at once
        opened = open_package(package)
        with pytest.raises(PackageError, match=message):
            read_golden(opened)
    (package / SUMS).unlink()
    with pytest.raises(PackageError, match="cannot be read"):
        package_digest(package)


def test_a_variant_that_is_not_there(package: Path) -> None:
    manifest = read_package(package)
    assert manifest.variant("int8").file == "model.int8.ort"
    assert manifest.variant("fp32", "onnx").file == "model.fp32.onnx"
    with pytest.raises(PackageError, match="no bf16 model in ort format"):
        manifest.variant("bf16")
