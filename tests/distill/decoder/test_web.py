"""Greedy tokens of onnxruntime-web, beside those of torch."""

import json
import subprocess
from pathlib import Path

import numpy as np

from isthmus.orchestration.runtimes.web import installed
from isthmus.package.clients import FOLDER
from tests.distill.decoder.support import greedy_naively, tiny

SCRIPT = Path(__file__).with_name("greedy.mjs")


def test_a_browser_says_what_torch_says(package: Path, tmp_path: Path) -> None:
    draw, model = np.random.default_rng(4), tiny()
    prompts = [draw.integers(2, 600, length).tolist() for length in (1, 2, 7, 30, 300)]
    cases = {"folder": str(package), "file": "model.fp32.ort", "prompts": prompts, "most": 32}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [
        "node",
        str(SCRIPT),
        str(installed() / "ort.mjs"),
        str(FOLDER / "generate.mjs"),
        str(tmp_path / "cases.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "said": [greedy_naively(model, prompt, 32) for prompt in prompts],
        "refused": [f"the prompt has {count} tokens; expected 1 to 383" for count in (0, 384)],
    }
