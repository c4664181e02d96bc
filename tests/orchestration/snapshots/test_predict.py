"""What a model in a browser is fed, and a core that any runtime computes: `model.mjs` and `predict.mjs`, in Node."""

import json
import shutil
import subprocess
from pathlib import Path

import msgspec

from isthmus.features.types import Float64, Int64, String
from isthmus.features.values.columns import from_python
from isthmus.orchestration.runtimes.web import SOURCES
from isthmus.package.clients import CLIENT, READER, sources
from isthmus.package.golden import TensorBytes
from isthmus.package.inputs import ModelInput, feeds

HEAD = {
    "version": 1,
    "inputs": [["x", "Float32", "number"], ["x", "Float32", "valid"]],
    "constants": [["float", ["40000000"]]],
    "steps": [["Mul", "float", [0, 2]], ["Not", "bool", [1]]],
    "outputs": [["numbers", "float", [3]]],
    "refused": 4,
}
SCRIPT = """
import { readFileSync } from "node:fs";
import { Head } from "./head.mjs";
import { Predictor } from "./predict.mjs";
const head = new Head(readFileSync("head.json"));
let calls = 0;
const core = async ({ numbers }) => (calls++, numbers[0] + 1);
const predictor = new Predictor(null, { head, core });
console.log(JSON.stringify([
  await predictor.predict({ x: 1.5 }),
  String((await predictor.predict({ x: null })).value),
  calls,
]));
"""


def test_a_core_is_asked_for_rows_that_are_not_refused(tmp_path: Path) -> None:
    for name, source in sources([CLIENT, READER]).items():
        (tmp_path / name).write_bytes(source)
    for name in ("predict.mjs", "model.mjs"):
        shutil.copy(SOURCES / name, tmp_path)
    (tmp_path / "head.json").write_text(json.dumps(HEAD), encoding="utf-8")
    (tmp_path / "ask.mjs").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(["node", "ask.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"value": 4.0, "by": "model", "why": None}, "NaN", 1]


FEEDS = """
import { readFileSync } from "node:fs";
import { feeds } from "./model.mjs";
import { all } from "./tensors.mjs";
const ort = { Tensor: class { constructor(type, data, dims) { Object.assign(this, { type, data, dims }); } } };
const { manifest, numbers } = JSON.parse(readFileSync("asked.json"));
const rows = [...numbers.map((digits) => ({ n: BigInt(digits), x: null, s: null })), { n: null, x: 0.1, s: "a" }, {}];
console.log(JSON.stringify(all(feeds(ort, manifest, rows))));
"""


def test_the_tensors_of_rows_are_those_of_the_server(tmp_path: Path) -> None:
    """Whole numbers that a double has no room for are rounded once, and what a row lacks is null wherever it stands."""
    halfway = [(1 << bits) + (1 << bits - 24) + bit for bits in range(53, 63) for bit in (-1, 0, 1)]
    whole = [*halfway, *(-number for number in halfway), 0, -1, 2**63 - 1, -(2**63), 2**53 + 1]
    inputs = [
        ModelInput("n", Int64), ModelInput("x", Float64), ModelInput("s", String),
        ModelInput("n", Int64, row=True), ModelInput("x", Float64, row=True), ModelInput("s", String, row=True),
    ]  # fmt: skip
    columns = {
        "n": from_python([*whole, None, None], Int64),
        "x": from_python([*[None] * len(whole), 0.1, None], Float64),
        "s": from_python([*[None] * len(whole), "a", None], String),
    }
    expected = {name: TensorBytes.of(data) for name, data in feeds(inputs, columns).items()}
    given = [("n", "Int64", "numeric", 0), ("x", "Float64", "numeric", 1), ("s", "String", "categories", 0)]
    given += [("n", "Int64", "given_int64", 0), ("x", "Float64", "given_double", 0), ("s", "String", "given_string", 0)]
    names = ("name", "dtype", "tensor", "position")
    manifest = {
        "inputs": [dict(zip(names, one, strict=True)) for one in given],
        "tensors": [{"name": name, "element": tensor.element} for name, tensor in expected.items()],
    }
    for name in ("model.mjs", "tensors.mjs"):
        shutil.copy(SOURCES / name, tmp_path)
    (tmp_path / "asked.json").write_text(json.dumps({"manifest": manifest, "numbers": [*map(str, whole)]}))
    (tmp_path / "ask.mjs").write_text(FEEDS, encoding="utf-8")
    done = subprocess.run(["node", "ask.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout, type=dict[str, TensorBytes]) == expected
