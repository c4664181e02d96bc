"""Embed a question with the API and print the nearest passages: `python ask.py 'shortest path in a graph'`.

The API is `isthmus serve` on this machine, or at the address in the environment variable API. It takes tokens, by the
Open Inference Protocol. Tokenizer, passages and their vectors come from the deployed package.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
from tokenizers import Tokenizer

API = os.environ.get("API", "http://127.0.0.1:6570")
MODEL = f"{API}/v2/models/docsearch"
DEPLOYED = Path(__file__).parent / ".isthmus" / "deployments"


def fetch(url: str, message: object = None) -> Any:
    body = None if message is None else json.dumps(message).encode()
    with urlopen(Request(url, body)) as response:  # noqa: S310 - the address is the user's
        return json.load(response)


def main(question: str) -> None:
    """Print the names of the nearest passages, nearest first."""
    version = fetch(MODEL)["versions"][0]
    package = DEPLOYED / version
    tokens = Tokenizer.from_file(str(package / "tokenizer.json")).encode(question).ids
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [1, len(tokens)], "data": data}
        for name, data in (("input_ids", tokens), ("attention_mask", [1] * len(tokens)))
    ]
    (output,) = fetch(f"{MODEL}/versions/{version}/infer", {"inputs": inputs})["outputs"]
    passages = json.loads((package / "index.json").read_bytes())
    vectors = np.frombuffer((package / "index.i8").read_bytes(), np.int8).reshape(len(passages), -1)
    for place in np.argsort(-(vectors @ np.array(output["data"], np.float32)), kind="stable")[:5]:
        sys.stdout.write(f"{passages[place]['name']}\n")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
