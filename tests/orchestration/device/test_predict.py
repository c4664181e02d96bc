"""A core that any runtime computes, fed by the head: `predict.mjs`, in Node."""

import json
import shutil
import subprocess
from pathlib import Path

from isthmus.features.clients import CLIENT, READER, sources
from isthmus.orchestration.runtimes.web import SOURCES

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
