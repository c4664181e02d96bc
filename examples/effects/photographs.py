"""Write the frames of each photograph, with a digest of their pixels, to data/frames.parquet: `python photographs.py`.

The photographs come with scikit-image and scikit-learn; nothing is downloaded.
"""

import hashlib
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from skimage.io import imread

from isthmus import DependencyError

Array = np.ndarray[Any, Any]

PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "ihc": ("skimage", "data/ihc.png"),
    "motorcycle_left": ("skimage", "data/motorcycle_left.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
}
"""Package and file of each photograph."""
SIDE = 256  # of a frame, in pixels
GRID = 4
"""Frames per row and per column of a photograph."""
PAN = (2, 1)
"""Offset of a frame's neighbor to the right and down, like the next frame of a film."""
FILE = Path(__file__).parent / "data" / "frames.parquet"


@cache
def photograph(name: str) -> Array:
    """Return the pixels, (height, width, 3) uint8.

    Raises:
        DependencyError: its package is not installed.
    """
    package, file = PHOTOGRAPHS[name]
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DependencyError(package, "is not installed", remedy="pip install 'isthmus[effects]'", passes=False)
    pixels: Array = imread(Path(spec.submodule_search_locations[0]) / file)
    return pixels


def cut(image: Array, x: int, y: int) -> Array:
    """Return the frame of an image (height, width, ...) with this top left corner."""
    return image[y : y + SIDE, x : x + SIDE]


def places(name: str) -> Iterator[tuple[int, int]]:
    """Yield the top left corners of a photograph's frames: a grid, each followed by its neighbor."""
    height, width = photograph(name).shape[:2]
    for y in np.linspace(0, height - SIDE - PAN[1], GRID).round().astype(int).tolist():
        for x in np.linspace(0, width - SIDE - PAN[0], GRID).round().astype(int).tolist():
            yield x, y
            yield x + PAN[0], y + PAN[1]


def digest(frame: Array) -> str:
    """Return the SHA-256 of a frame's pixels."""
    return hashlib.sha256(np.ascontiguousarray(frame).tobytes()).hexdigest()


def frames() -> pa.Table:
    """Return all frames by photograph, from top to bottom."""
    found = []
    for name in sorted(PHOTOGRAPHS):
        for x, y in places(name):
            frame = cut(photograph(name), x, y)
            found.append({
                "photograph": name, "x": x, "y": y, "pixels": digest(frame), "contrast": float(frame.std() / 255)
            })  # fmt: skip
    return pa.Table.from_pylist(found)


if __name__ == "__main__":
    table = frames()
    FILE.parent.mkdir(exist_ok=True)
    pq.write_table(table, FILE)
    sys.stdout.write(f"{table.num_rows:,} frames in {FILE}\n")
