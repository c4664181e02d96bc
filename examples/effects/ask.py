"""Draw a frame with the API and write frame and drawing to data/asked.png: `python ask.py`.

The API is `isthmus serve` on this machine, or at the address in the environment variable API. By the Open Inference
Protocol, JSON describes the tensors and their numbers follow as bytes.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
from definitions import SIDE
from photographs import photograph
from skimage.io import imsave

API = os.environ.get("API", "http://127.0.0.1:6570")
JSON_LENGTH = "Inference-Header-Content-Length"
FILE = Path(__file__).parent / "data" / "asked.png"

Array = np.ndarray[Any, Any]


def drawn(frames: Array) -> Array:
    """Return the drawings of frames; both (n, 3, 256, 256) float32 in [0, 1]."""
    described = {
        "name": "image", "datatype": "FP32", "shape": frames.shape, "parameters": {"binary_data_size": frames.nbytes}
    }  # fmt: skip
    head = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    request = Request(f"{API}/v2/models/effects/infer", head + frames.tobytes(), {JSON_LENGTH: str(len(head))})  # noqa: S310
    with urlopen(request) as response:  # noqa: S310 - the address is the user's
        answer, length = response.read(), int(response.headers[JSON_LENGTH])
    (output,) = json.loads(answer[:length])["outputs"]
    return np.frombuffer(answer[length:], np.float32).reshape(output["shape"])


def main() -> None:
    """Draw a frame of a photograph that no network was trained on."""
    frame = (photograph("coffee")[20 : 20 + SIDE, 150 : 150 + SIDE] / 255).astype(np.float32)
    (drawing,) = drawn(np.ascontiguousarray(frame.transpose(2, 0, 1))[None])
    pair = np.concatenate([frame, drawing.transpose(1, 2, 0)], axis=1)
    FILE.parent.mkdir(exist_ok=True)
    imsave(FILE, (255 * pair).round().astype(np.uint8))
    sys.stdout.write(f"{FILE}: {SIDE} x {SIDE} pixels, and the drawing of {API}\n")


if __name__ == "__main__":
    main()
