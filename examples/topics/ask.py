"""Print the topics of a text, as an app would compute them: `python ask.py "a text"`, after `isthmus model export`."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


def topics(package: Path, text: str) -> list[tuple[float, str]]:
    """Return the probability of each topic, the highest first."""
    manifest = json.loads((package / "manifest.json").read_text())
    tokens = np.array([Tokenizer.from_file(str(package / "tokenizer.json")).encode(text).ids])
    ort = min((file for file in manifest["variants"] if file["format"] == "ort"), key=lambda file: file["bytes"])
    session = onnxruntime.InferenceSession(package / ort["file"])
    (answer,) = session.run(None, {"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    return sorted(zip(answer[0].tolist(), manifest["classes"], strict=True), reverse=True)


if __name__ == "__main__":
    folders = sorted(Path(".isthmus/packages").glob("topics-*"), key=lambda folder: folder.stat().st_mtime)
    if len(sys.argv) != 2 or not folders:
        sys.exit("usage: python ask.py TEXT, after isthmus model export")
    for share, topic in topics(folders[-1], sys.argv[1])[:3]:
        sys.stdout.write(f"{share:.2f} {topic}\n")
