"""Hundreds of packages that somebody or something has altered: each is refused, and the reason is named."""

import base64
import hashlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import PackageError
from isthmus.package import replay
from isthmus.package.checksums import SUMS, verify_checksums
from isthmus.package.inspect import inspect
from isthmus.package.signature import Signer, key_name, read_public_key, require_signature
from tests.distill.packages import of_rows, of_tensors, resum, rewritten
from tests.signing import pair

Corruption = Callable[[Path], object]
FILES = (
    SUMS, "README.md", "contract.json", "golden.json", "manifest.json", "preparation.json",
    "model.fp32.onnx", "model.fp32.ort", "model.int8.onnx", "model.int8.ort",
)  # fmt: skip
JSON = ("contract.json", "golden.json", "manifest.json")
NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

APART = r"answers \S+ where the package answers \S+, inf apart"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_rows(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def package(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "package"))


def drawn(name: str, change: Callable[[bytearray, random.Random], object], seed: int) -> Corruption:
    """A change of a file's bytes at a place that the seed decides."""

    def corrupt(package: Path) -> None:
        data = bytearray((package / name).read_bytes())
        change(data, random.Random(f"{name} {seed}"))
        (package / name).write_bytes(data)

    return corrupt


def flip(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def insert(data: bytearray, draw: random.Random) -> None:
    data.insert(draw.randrange(len(data) + 1), draw.randrange(256))


def swap(one: str, other: str) -> Corruption:
    def corrupt(package: Path) -> None:
        (package / one).rename(package / "x")
        (package / other).rename(package / one)
        (package / "x").rename(package / other)

    return corrupt


def blunt() -> Iterator[tuple[str, Corruption]]:
    """What a disk, a network or a hand that slips does."""
    for name in FILES:
        yield from ((f"{name} flipped {n}", drawn(name, flip, n)) for n in range(8))
        yield from ((f"{name} cut {n}", drawn(name, cut, n)) for n in range(3))
        yield from ((f"{name} inserted {n}", drawn(name, insert, n)) for n in range(2))
        yield f"{name} without its last byte", drawn(name, lambda data, _: data.pop(), 0)
        yield f"{name} twice", drawn(name, lambda data, _: data.extend(data), 0)
        yield f"{name} gone", replaced(name, lambda _: None)
        yield f"{name} empty", replaced(name, Path.touch)
    draw = random.Random(0)
    for one, other in draw.sample([(a, b) for a in FILES for b in FILES if a < b], 20):
        yield f"{one} for {other}", swap(one, other)


def both(*parts: Corruption) -> Corruption:
    """One after the other."""

    def corrupt(package: Path) -> None:
        for part in parts:
            part(package)

    return corrupt


def listed(name: str, digest: str = NOTHING) -> Corruption:
    """A line more in the sums."""

    def corrupt(package: Path) -> None:
        with (package / SUMS).open("ab") as sums:
            sums.write(f"{digest}  ".encode() + os.fsencode(name) + b"\n")

    return corrupt


def changed_sums(change: Callable[[bytes], bytes]) -> Corruption:
    return lambda p: (p / SUMS).write_bytes(change((p / SUMS).read_bytes()))


def replaced(name: str, make: Callable[[Path], object]) -> Corruption:
    """Something else in a file's place."""

    def corrupt(package: Path) -> None:
        (package / name).unlink(missing_ok=True)
        make(package / name)

    return corrupt


def moved_and_linked(name: str) -> Corruption:
    """The right bytes, but outside."""

    def corrupt(package: Path) -> None:
        (package / name).rename(package.parent / "elsewhere")
        (package / name).symlink_to(package.parent / "elsewhere")

    return corrupt


def linked(name: str) -> Corruption:
    """The right file, that is another one, too."""
    return lambda package: os.link(package / name, package.parent / "elsewhere")


def clashing(package: Path) -> None:
    shutil.copy(package / "model.fp32.ort", package / "MODEL.fp32.ort")
    resum(package)


def unexplained(package: Path) -> None:
    (package / "more.bin").write_bytes(b"more")
    resum(package)


def sparse(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(2**40)


def larger(name: str, most: int) -> Corruption:
    """A byte more than is read as a whole."""
    return lambda package: os.truncate(package / name, most + 1)


STRUCTURE: dict[str, tuple[Corruption, str]] = {
    "name above": (listed("../x"), r"\.\./x leaves the package folder"),
    "name above, there": (both(lambda p: (p.parent / "x").touch(), listed("../x")), "leaves the package"),
    "absolute name": (listed("/etc/passwd"), "/etc/passwd leaves the package folder"),
    "name within a folder": (listed("more/x"), "more/x leaves the package folder"),
    "backslash": (listed("..\\x"), "leaves the package folder"),
    "drive": (listed("C:x"), "leaves the package folder"),
    "the folder above": (listed(".."), "leaves the package folder"),
    "the folder": (listed("."), "leaves the package folder"),
    "NUL": (listed("a\0b"), "is not a file name"),
    "escape": (listed("\x1b[2Jx"), r"'\\x1b\[2Jx' is not a file name"),
    "right to left": (listed("\u202etxt.x"), "is not a file name"),
    "carriage return": (changed_sums(lambda sums: sums.replace(b"\n", b"\r\n")), "is not a file name"),
    "line separator": (listed("README.md\u2028x"), "is not a file name"),
    "long name": (listed("x" * 5000), "x… is not a file name"),
    "long line": (changed_sums(lambda sums: sums + b"y" * 100_000 + b"\n"), "y…'; expected a SHA-256 sum"),
    "surrogate": (changed_sums(lambda sums: sums + b"0" * 64 + b"  \xed\xa0\x80\n"), "cannot be read"),
    "not UTF-8": (listed(os.fsdecode(b"\xff\xfe")), "cannot be read"),
    "sum of the sums": (listed(SUMS), "cannot have a sum"),
    "sum of the signature": (listed("model.sig"), "cannot have a sum"),
    "sum in capitals": (changed_sums(lambda sums: sums[:64].upper() + sums[64:]), "expected a SHA-256 sum"),
    "nothing there": (listed("more.bin"), r"more\.bin: missing"),
    "listed twice": (listed("README.md"), "is listed twice"),
    "huge sums": (changed_sums(lambda sums: sums * 2000), "bytes; expected at most 1,048,576"),
    "huge size": (replaced("model.fp32.ort", sparse), r"model\.fp32\.ort: 1,099,511,627,776 bytes; expected at most"),
    **{
        f"large {name}": (larger(name, most), rf"{name}: {most + 1:,} bytes; expected at most {most:,}")
        for name, most in {"manifest.json": 2**24, "contract.json": 2**24, "golden.json": 2**28}.items()
    },
    "huge README": (replaced("README.md", sparse), "1,099,511,627,776 bytes"),
    "case": (clashing, r"model\.fp32\.ort differs from MODEL\.fp32\.ort only in upper and lower case"),
    "unlisted, for a terminal": (lambda p: (p / "\x1b[2J").touch(), r"\\x1b\[2J: not listed in SHA256SUMS"),
    "unlisted": (lambda p: (p / "more.bin").write_bytes(b""), r"more\.bin: not listed in SHA256SUMS"),
    "unexplained": (unexplained, r"does not mention more\.bin"),
    "folder": (lambda p: (p / "more").mkdir(), "more: not a plain file"),
    "pipe": (lambda p: os.mkfifo(p / "more"), "more: not a plain file"),
    "the sums are endless": (replaced(SUMS, lambda f: f.symlink_to("/dev/zero")), "SHA256SUMS: not a plain file"),
    "a package is a file": (both(shutil.rmtree, Path.touch), "expected a package folder"),
    "a package is a loop": (both(shutil.rmtree, lambda p: p.symlink_to(p)), "expected a package folder"),
    "a package is gone": (shutil.rmtree, "expected a package folder"),
    **{f"{name} is a folder": (replaced(name, Path.mkdir), f"{name}: not a plain file") for name in FILES},
    **{f"{name} is elsewhere": (moved_and_linked(name), f"{name}: not a plain file") for name in FILES},
    **{
        f"{name} has another name": (linked(name), f"{name}: has 2 names .* a file with one name.*`cp -r` and use")
        for name in FILES
    },
    **{f"{name} is a pipe": (replaced(name, os.mkfifo), f"{name}: not a plain file") for name in (SUMS, *JSON)},
}  # fmt: skip


def written(name: str, data: bytes) -> Corruption:
    """A file of a forger's, with the sums made again."""

    def corrupt(package: Path) -> None:
        before = (package / name).read_bytes()
        (package / name).write_bytes(data)
        sums = (package / SUMS).read_bytes()
        (package / SUMS).write_bytes(sums.replace(digest(before), digest(data)))

    return corrupt


def doubled(name: str, before: bytes, more: bytes) -> Corruption:
    """A key more, after the first place of `before`, that is there already."""

    def corrupt(package: Path) -> None:
        data = (package / name).read_bytes()
        assert before in data
        written(name, data.replace(before, before + more, 1))(package)

    return corrupt


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def no_json() -> Iterator[tuple[str, Corruption]]:
    contents = {
        "nested": b"[" * 200_000, "nested whole": b"[" * 100_000 + b"]" * 100_000, "objects": b'{"a":' * 100_000,
        "nested inside": b'{"format_version": 2, "views": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "no text": b'{"name": "\xff\xfe"}', "nothing": b"", "null": b"null", "list": b"[]", "number": b"2",
        "not a number": b'{"format_version": NaN}', "large": b'{"format_version": 1' + b"0" * 5000 + b"}",
        "cut": b'{"format_version": 2', "UTF-16": '{"format_version": 2}'.encode("utf-16"),
    }  # fmt: skip
    for name in JSON:
        yield from ((f"{name}: {what}", written(name, data)) for what, data in contents.items())


def mistyped(name: str, seed: int) -> Corruption:
    """A value of another type somewhere in a JSON file."""

    def change(data: Any) -> None:
        draw = random.Random(f"{name} {seed}")
        places = list(inside(data))
        holder, key = draw.choice(places)
        holder[key] = [{}]

    return rewritten(name, change)


def inside(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a JSON document."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield data, key
        if isinstance(value, dict | list):
            yield from inside(value)


def shifted(seed: int) -> Corruption:
    """One recorded number is another one."""

    def change(golden: Any) -> None:
        draw = random.Random(seed)
        case = draw.choice(golden["cases"])
        kept = draw.choice(list(case["outputs"].values()))["probability"]
        numbers = np.frombuffer(base64.b64decode(kept["data"]), "<f4").copy()
        numbers[draw.randrange(len(numbers))] += draw.choice([-1, 1]) * draw.uniform(1e-4, 0.1)
        kept["data"] = base64.b64encode(numbers.tobytes()).decode()

    return rewritten("golden.json", change)


def first(golden: Any) -> Any:
    return golden["cases"][0]


def answers(golden: Any, value: float) -> None:
    kept = first(golden)["outputs"]["model.int8.ort"]["probability"]
    kept["data"] = base64.b64encode(np.full(kept["shape"], value, "<f4").tobytes()).decode()


def swapped(golden: Any) -> None:
    rows = first(golden)["rows"]
    rows[0], rows[1] = rows[1], rows[0]


def set_row(column: int, value: Any) -> Corruption:
    return rewritten("golden.json", lambda g: first(g)["rows"][3].__setitem__(column, value))


def changed(**values: Any) -> Corruption:
    return rewritten("manifest.json", lambda m: m.update(values))


def of_input(place: int, **values: Any) -> Corruption:
    return rewritten("manifest.json", lambda m: m["inputs"][place].update(values))


def of_tensor(kind: str, **values: Any) -> Corruption:
    return rewritten("manifest.json", lambda m: m[kind][0].update(values))


def of_model(**values: Any) -> Corruption:
    return rewritten("manifest.json", lambda m: m["variants"][0].update(values))


CORE = [{"name": "numbers", "element": "float", "shape": ["N", 7]}]


def outside_data(package: Path) -> None:
    """A model whose weights lie in a file outside."""
    (package.parent / "weights").write_bytes(bytes(32))
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="../weights")
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["w"], ["probability"])], "g", [],
        [helper.make_tensor_value_info("probability", TensorProto.FLOAT, ["n"])], [weights],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (package / "model.fp32.onnx").write_bytes(model.SerializeToString())
    resum(package)


def endless(package: Path) -> None:
    """A graph that counts to 2**62 before it answers."""
    file = package / "model.fp32.onnx"
    model = onnx.load_model(file)
    counts = [helper.make_tensor_value_info(name, TensorProto.INT64, []) for name in ("turn", "before", "after")]
    more = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("on", "still_on")]
    body = helper.make_graph(
        [helper.make_node("Add", ["before", "turn"], ["after"]), helper.make_node("Identity", ["on"], ["still_on"])],
        "body", [counts[0], more[0], counts[1]], [more[1], counts[2]],
    )  # fmt: skip
    answer = model.graph.output[0].name
    last = next(node for node in model.graph.node if answer in node.output)
    last.output[:] = ["answer" if name == answer else name for name in last.output]
    model.graph.initializer.extend(
        helper.make_tensor(name, kind, [], [value])
        for name, kind, value in (("turns", TensorProto.INT64, 2**62), ("yes", TensorProto.BOOL, True))
    )
    model.graph.node.extend([
        helper.make_node("Shape", [model.graph.input[0].name], ["sizes"]),
        helper.make_node("ReduceMin", ["sizes"], ["begin"], keepdims=0),
        helper.make_node("Loop", ["turns", "yes", "begin"], ["counted"], body=body),
        helper.make_node("Cast", ["counted"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["answer", "number"], [answer]),
    ])  # fmt: skip
    file.write_bytes(model.SerializeToString())
    resum(package)


def other_model(package: Path) -> None:
    """A model of the same tensors that knows nothing."""
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Identity", ["categories"], ["unused"]),
        helper.make_node("ReduceMin", ["numeric", "axes"], ["least"], keepdims=0),
        helper.make_node("IsNaN", ["least"], ["none"]),
        helper.make_node("Cast", ["none"], ["probability"], to=TensorProto.FLOAT),
    ]
    manifest = json.loads((package / "manifest.json").read_bytes())
    kinds = {"numeric": TensorProto.FLOAT, "categories": TensorProto.STRING, "probability": TensorProto.FLOAT}
    values = {
        tensor["name"]: value(tensor["name"], kinds[tensor["name"]], tensor["shape"])
        for tensor in manifest["tensors"] + manifest["outputs"]
    }
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(nodes, "g", [values["numeric"], values["categories"]], [values["probability"]], [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (package / "model.fp32.onnx").write_bytes(model.SerializeToString())
    resum(package)


def forged(name: str, data: bytes) -> Corruption:
    return both(lambda p: (p / name).write_bytes(data), resum)


def exchanged(one: str, other: str) -> Corruption:
    return both(swap(one, other), resum)


def undeclared(contract: Any) -> None:
    contract["services"]["features"]["request"][0][1] = "Int64"


FORGED: dict[str, tuple[Corruption, str]] = {
    "version": (changed(format_version=3), "format version 3; expected 2"),
    "another contract": (changed(contract="0" * 64), "expected 000000000000, as in the manifest"),
    "another service": (changed(service="others"), "no service others; expected features"),
    "no model": (changed(variants=[]), "names no model file"),
    "no input": (changed(inputs=[]), "golden.json: an input carrier; expected the inputs of the manifest"),
    "no tensor": (changed(tensors=[]), "incomplete case"),
    "no output": (changed(outputs=[]), "incomplete case"),
    "a name for a terminal": (changed(name="\x1b[2J"), r"a name is '\\x1b\[2J'; expected at most 255 printable char"),
    "a long name": (changed(service="x" * 256), "a name is 'x{60}'"),
    "a tensor for a terminal": (of_tensor("outputs", name="\x1b[2J"), r"a name is '\\x1b\[2J'"),
    "a long word": (of_model(precision="x" * 5000), "Invalid enum value 'xxx"),
    "a long sum": (of_model(sha256="x" * 5000), "a name is 'x{60}'"),
    "a field more": (changed(more=1), "unknown field `more`"),
    "a file for a terminal": (changed(files={"\x1b[2J": "for you"}), r"\\x1b\[2J has no sum"),
    "a size for a terminal": (of_model(most={"\x1b[2J": 1}), r"at most 1 of \\x1b\[2J; expected"),
    "a field for a terminal": (changed(**{"\x1b[2J": 1}), r"unknown field `\\x1b\[2J`"),
    "a long file": (changed(files={"x" * 5000: "for you"}), "x…; expected listed in SHA256SUMS"),
    "a column for a terminal": (
        rewritten("golden.json", lambda g: g["inputs"].__setitem__(0, "\x1b[2J")), r"an input \\x1b\[2J",
    ),
    "elements for a terminal": (
        rewritten("golden.json", lambda g: first(g)["tensors"]["numeric"].update(element="\x1b[2J")),
        r"elements of kind \\x1b\[2J",
    ),
    "many sizes": (
        rewritten("golden.json", lambda g: first(g)["tensors"]["numeric"].update(shape=[1] * 5000)), "cannot reshape",
    ),
    "a file outside": (changed(files={"../x": "for you"}), r"\.\./x has no sum"),
    "a type": (of_input(1, dtype="Bytes"), "input distance has type Bytes"),
    "a number is a text": (of_input(1, dtype="String"), r"input distance is numeric\[0\]; expected categories"),
    "a type that fits": (of_input(2, dtype="Int32"), "hour is Int64; expected hour of type Int32"),
    "a place": (of_input(1, position=1), r"distance is numeric\[1\]; expected numeric\[0\]"),
    "a tensor": (of_input(1, tensor="given_float"), r"input hour is numeric\[1\]; expected numeric\[0\]"),
    "a name": (of_input(1, name="hour"), "two inputs hour in numeric"),
    "an unknown name": (of_input(1, name="far"), "has no far; expected far of type Float32, as in the manifest"),
    "the order": (
        rewritten("manifest.json", lambda m: (m["inputs"].insert(1, m["inputs"].pop(2)),
                                              m["inputs"][1].update(position=0), m["inputs"][2].update(position=1))),
        "case 0: its rows do not reproduce the recorded tensor numeric",
    ),
    "an element": (of_tensor("tensors", element="double"), "holds float and not double"),
    "a fixed size": (of_tensor("tensors", shape=[1, 6]), "has shape"),
    "dimensions": (of_tensor("outputs", shape=["n", 1]), "has shape"),
    "a variable size": (of_tensor("tensors", shape=["n", "m"]), r"inputs: numeric: float .*; expected float"),
    "an output": (of_tensor("outputs", name="score"), "incomplete case"),
    "bytes": (of_model(bytes=2**60), r"has .* bytes; expected 1,152,921,504,606,846,976"),
    "a model outside": (of_model(file="../model.onnx"), r"\.\./model\.onnx has no sum"),
    "a format": (of_model(format="ort"), "two models fp32 in ort format"),
    "a core without inputs": (of_model(core=True), "has no inputs of a core; expected inputs and model files of it"),
    "inputs of no core": (changed(core=CORE), "has inputs of a core; expected inputs and model files of it"),
    "a core for ONNX Runtime": (
        both(changed(core=CORE), of_model(core=True)), r"model\.fp32\.onnx is a core in onnx format",
    ),
    "a core without cases": (both(changed(core=CORE), of_model(core=True, format="pte")), "incomplete case"),
    "a core twice": (
        both(changed(core=CORE * 2), of_model(core=True, format="pte")), "two tensors of the core numbers",
    ),
    "a file twice": (of_model(file="model.int8.ort"), "two model files model.int8.ort"),
    "no cases": (rewritten("golden.json", lambda g: g.update(cases=[])), "no case"),
    "answers": (rewritten("golden.json", lambda g: answers(g, 0.5)), "does not reproduce its golden outputs"),
    "no numbers": (rewritten("golden.json", lambda g: answers(g, np.nan)), APART),
    "infinite": (rewritten("golden.json", lambda g: answers(g, np.inf)), APART),
    "rows": (rewritten("golden.json", swapped), "case 0: its rows do not reproduce the recorded tensor"),
    "a value": (set_row(1, 12.5), "do not reproduce the recorded tensor numeric"),
    "a text": (set_row(0, "ZZ"), "do not reproduce the recorded tensor categories"),
    "null": (set_row(2, None), "do not reproduce the recorded tensor numeric"),
    "a word": (set_row(1, "infinity"), "input distance is 'infinity', which is not a valid Float32"),
    "a number for a text": (set_row(0, 5), "input carrier is 5, which is not a valid String"),
    "truth": (set_row(2, True), "input hour is True, which is not a valid Int64"),
    "beyond 64 bits": (set_row(2, 2**63), "golden.json: "),
    "far beyond": (set_row(2, 2**90), "golden.json: "),
    "beyond 32 bits": (set_row(1, 1e300), "do not reproduce the recorded tensor numeric"),
    "a shape": (rewritten("golden.json", lambda g: first(g)["tensors"]["numeric"].update(shape=[-1, 6])), "of shape"),
    "a huge shape": (
        rewritten("golden.json", lambda g: first(g)["tensors"]["numeric"].update(shape=[2**62, 6])), "cannot reshape",
    ),
    "shape beyond": (
        rewritten("golden.json", lambda g: first(g)["tensors"]["numeric"].update(shape=[2**80])), "golden.json: ",
    ),
    "a contract": (rewritten("contract.json", lambda c: c.update(project="trains")), "its content has hash"),
    "a type in the contract": (rewritten("contract.json", undeclared), "its content has hash"),
    "a long type in the contract": (
        rewritten("contract.json", lambda c: c["services"]["features"]["request"][0].__setitem__(1, "x" * 5000)),
        "is not a contract \\('xxx",
    ),
    "no model at all": (forged("model.fp32.ort", b"ORTM"), "onnxruntime refuses it"),
    "an empty model": (forged("model.int8.onnx", b""), "onnxruntime refuses it"),
    "precisions": (exchanged("model.fp32.ort", "model.int8.ort"), "does not reproduce its golden outputs"),
    **{
        f"{key} twice in {name}": (
            doubled(name, before, more), rf"{name}: has the key '{key}' twice; expected each key once",
        )
        for name, before, more, key in (
            ("manifest.json", b"{", b'"name": "other", ', "name"),
            ("manifest.json", b'"quality": {', b'"auc": 1.0, ', "auc"),
            ("contract.json", b"{", b'"hash": "0", ', "hash"),
            ("golden.json", b"{", b'"cases": [], ', "cases"),
            ("golden.json", b'"tensors":{', b'"numeric":{"element":"float","shape":[0]},', "numeric"),
        )
    },
    "a key twice, for a terminal": (
        doubled("contract.json", b"{", b'"\\u001b[2J": 1, "\\u001b[2J": 2, '), r"has the key '\\x1b\[2J' twice",
    ),
    "a model with files": (outside_data, "escapes model directory|onnxruntime refuses it"),
    "another model": (other_model, "does not reproduce its golden outputs"),
}  # fmt: skip

DRAWN: dict[str, Corruption] = {
    **dict(blunt()),
    **dict(no_json()),
    **{f"manifest mistyped {n}": mistyped("manifest.json", n) for n in range(20)},
    **{f"golden mistyped {n}": mistyped("golden.json", n) for n in range(20)},
    **{f"golden number {n}": shifted(n) for n in range(10)},
}


@pytest.mark.accept
def test_a_graph_that_never_ends(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "SECONDS", 0.5)
    endless(package)
    inspection = inspect(package)
    refused = [check for check in inspection.checks if check.error is not None]
    assert [check.subject for check in refused] == ["model.fp32.onnx"]
    assert "no answer in 0.5 seconds" in refused[0].finding


class Reading:
    """Which files are opened."""

    def __init__(self) -> None:
        self.found: list[Path] | None = None
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.found is not None and event == "open" and not isinstance(arguments[0], int):
            self.found.append(Path(os.fsdecode(arguments[0])))

    @contextmanager
    def within(self) -> Iterator[list[Path]]:
        """Those within the block."""
        found: list[Path] = []
        self.found = found
        try:
            yield found
        finally:
            self.found = None


READING = Reading()


def refused(package: Path) -> PackageError:
    """The refusal of a package, of which nothing was read that is not in it."""
    with READING.within() as read, pytest.raises(PackageError) as caught:
        inspect(package).require()
    assert [file for file in read if file.parent != package and not file.is_relative_to(sys.prefix)] == []
    assert caught.value.where
    assert caught.value.found
    assert len(str(caught.value)) < 2000
    assert str(caught.value).replace("\n", "").isprintable()
    return caught.value


def test_there_are_enough() -> None:
    assert len(DRAWN) + len(STRUCTURE) + len(FORGED) >= 200


def test_the_whole_package_passes(package: Path) -> None:
    with READING.within() as read:
        inspect(package).require()
    assert package / "golden.json" in read


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_corrupted_is_refused(package: Path, name: str) -> None:
    DRAWN[name](package)
    refused(package)


@pytest.mark.parametrize("name", [*STRUCTURE, *FORGED])
def test_what_is_forged_is_refused_for_its_reason(package: Path, name: str) -> None:
    corrupt, reason = (STRUCTURE | FORGED)[name]
    corrupt(package)
    assert re.search(reason, str(refused(package)))


def emptied(golden: Any) -> None:
    case = first(golden)
    for kept in chain(case["tensors"].values(), *(of.values() for of in case["outputs"].values())):
        kept["shape"][0] = 0
        kept.pop("data", None)
        kept.pop("texts", None)


def neither(golden: Any) -> None:
    first(golden)["tensors"]["bool"]["data"] = base64.b64encode(b"\x02\x00").decode()


@pytest.mark.parametrize(("change", "reason"), [
    (emptied, r"golden\.json: no values of output bool_out of model\.fp32\.onnx; expected at least one"),
    (neither, r"golden\.json: a bool that is neither 0 nor 1"),
])  # fmt: skip
def test_cases_that_ask_nothing_are_refused(tmp_path: Path, change: Callable[[Any], None], reason: str) -> None:
    package = of_tensors(tmp_path)
    inspect(package).require()
    rewritten("golden.json", change)(package)
    assert re.search(reason, str(refused(package)))


def free_text(package: Path) -> None:
    (package / "README.md").write_text("Feed it anything.")
    resum(package)


def consistent(package: Path) -> None:
    """The model of one precision in place of the other, with its answers: all of it fits together."""
    golden = json.loads((package / "golden.json").read_bytes())
    for case in golden["cases"]:
        case["outputs"]["model.fp32.ort"] = case["outputs"]["model.int8.ort"]
    (package / "golden.json").write_text(json.dumps(golden))
    shutil.copy(package / "model.int8.ort", package / "model.fp32.ort")
    resum(package)


def renamed(package: Path) -> None:
    contract = Contract.loads((package / "contract.json").read_bytes())
    other = replace(contract, project="trains")
    (package / "contract.json").write_bytes(other.dumps())
    changed(contract=other.hash)(package)


ONLY_A_SIGNATURE: dict[str, Corruption] = {
    "README": free_text,
    "preparation": rewritten("preparation.json", lambda p: p.update(more=1)),
    "quality": rewritten("manifest.json", lambda m: m["variants"][0]["quality"].update(auc=0.99)),
    "tolerance": of_model(tolerance=1e9),
    "worst": of_model(worst=0.0),
    "name": changed(name="better"),
    "student": changed(model="f" * 12),
    "training set": changed(training_set="none"),
    "metric": changed(metric="brier"),
    "task": changed(task="other:Task"),
    "purpose": rewritten("manifest.json", lambda m: m["files"].update({"preparation.json": "not needed"})),
    "model and golden cases": consistent,
    "contract and manifest": renamed,
}
"""Forgeries in which everything fits together: without a signature they pass."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A private key, its public key, and another one's."""
    folder = tmp_path_factory.mktemp("keys")
    (private, public), (_, other) = (pair(folder, name) for name in ("mine", "another"))
    return private, read_public_key(public), read_public_key(other)


@pytest.mark.parametrize("name", ONLY_A_SIGNATURE)
def test_what_fits_together_is_refused_by_its_signature(package: Path, keys: tuple[Path, str, str], name: str) -> None:
    private, public, _ = keys
    Signer(private).sign(package)
    inspect(package, key=public).require()
    ONLY_A_SIGNATURE[name](package)
    inspect(package).require()
    with pytest.raises(PackageError, match="was changed after it was signed"):
        inspect(package, key=public).require()


def bundle(change: Callable[[Any], object]) -> Corruption:
    def corrupt(package: Path) -> None:
        data = json.loads((package / "model.sig").read_bytes())
        change(data)
        (package / "model.sig").write_text(json.dumps(data))

    return corrupt


def signed(change: Callable[[Any], object]) -> Corruption:
    """What is signed, altered without the key."""

    def alter(data: Any) -> None:
        envelope = data["dsseEnvelope"]
        payload = json.loads(base64.b64decode(envelope["payload"]))
        change(payload)
        envelope["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()

    return bundle(alter)


def signature(data: bytes) -> Corruption:
    return replaced("model.sig", lambda file: file.write_bytes(data))


SIGNATURES: dict[str, tuple[Corruption, str]] = {
    "none": (lambda p: (p / "model.sig").unlink(), "missing: the package is not signed"),
    "empty": (signature(b""), "is not a signature"),
    "half": (lambda p: signature((p / "model.sig").read_bytes()[:700])(p), "is not a signature"),
    "no JSON": (signature(b"\xff\xfe"), "is not a signature"),
    "nested": (signature(b"[" * 200_000), "is not a signature"),
    "nested inside": (signature(b'{"a":' * 100_000), "is not a signature"),
    "nothing in it": (signature(b"{}"), "is not a signature"),
    "no key": (bundle(lambda d: d["verificationMaterial"].pop("publicKey")), "is not a signature"),
    "no name of the key": (bundle(lambda d: d["verificationMaterial"]["publicKey"].pop("hint")), "is not a signature"),
    "another key": (
        bundle(lambda d: d["verificationMaterial"]["publicKey"].update(hint="0" * 64)), "is signed by key 000000000000",
    ),
    "a strange key": (
        bundle(lambda d: d["verificationMaterial"]["publicKey"].update(hint="\x1b[2J")), r"by key '\\x1b\[2J'",
    ),
    "a key twice": (
        lambda p: signature((p / "model.sig").read_bytes().replace(b"{", b'{"mediaType": "x", ', 1))(p),
        "has the key 'mediaType' twice",
    ),
    "no envelope": (bundle(lambda d: d.pop("dsseEnvelope")), "is not a signature"),
    "no signatures": (bundle(lambda d: d["dsseEnvelope"].update(signatures=[])), "is not a signature"),
    "another signature": (
        bundle(lambda d: d["dsseEnvelope"]["signatures"][0].update(sig=base64.b64encode(bytes(70)).decode())),
        "is not a signature of key .*, although it names that key",
    ),
    "another kind": (bundle(lambda d: d.update(mediaType="text/plain")), "is not a signature"),
    "another statement": (signed(lambda s: s.update(predicateType="x")), "although it names that key"),
    "more is left out": (
        signed(lambda s: s["predicate"]["serialization"]["ignore_paths"].append("README.md")),
        "although it names that key",
    ),
    "a file less": (signed(lambda s: s["predicate"]["resources"].pop()), "although it names that key"),
    "a folder": (replaced("model.sig", Path.mkdir), "model.sig: not a plain file"),
    "a link": (moved_and_linked("model.sig"), "model.sig: not a plain file"),
    "another name": (linked("model.sig"), "model.sig: has 2 names"),
    "huge": (replaced("model.sig", sparse), "bytes; expected at most"),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_that_is_none_is_refused(package: Path, keys: tuple[Path, str, str], name: str) -> None:
    private, public, _ = keys
    Signer(private).sign(package)
    corrupt, reason = SIGNATURES[name]
    corrupt(package)
    inspection = inspect(package, key=public)
    with pytest.raises(PackageError, match=reason):
        inspection.require()
    # Nothing of it is opened in a runtime.
    assert [check.subject for check in inspection.checks][1:] in ([], ["model.sig"])


def test_a_signature_by_another_key_is_refused(package: Path, keys: tuple[Path, str, str]) -> None:
    private, public, other = keys
    Signer(private).sign(package)
    with pytest.raises(
        PackageError, match=f"signed by key {key_name(public)}; expected a signature by key {key_name(other)}"
    ):
        inspect(package, key=other).require()
    with pytest.raises(PackageError, match="must be signed, but the key to check it with is invalid"):
        require_signature(verify_checksums(package), "a key")
