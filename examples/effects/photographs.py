"""Cut photographs into frames and draw some of them: `python photographs.py`.

Writes data/frames, data/drawings and data/frames.parquet. The photographs come with scikit-image and scikit-learn;
nothing is downloaded.
"""

import sys
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from definitions import SIDE
from painting import effect
from skimage.io import imread, imsave
from torch import from_numpy

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
GRID = 5
"""Frames per row and per column of a photograph."""
DATA = Path(__file__).parent / "data"


def photograph(name: str) -> Array:
    """Return the pixels, (height, width, 3) uint8."""
    package, file = PHOTOGRAPHS[name]
    pixels: Array = imread(Path(str(files(package))) / file)
    return pixels


def painted(image: Array) -> Array:
    """Return an image (height, width, 3) uint8 with the effect."""
    drawn = effect(from_numpy(image.copy()).permute(2, 0, 1)[None].float() / 255)[0]
    return (255 * drawn).round().byte().permute(1, 2, 0).numpy()


def write(names: Iterable[str] = PHOTOGRAPHS, grid: int = GRID) -> pa.Table:
    """Write the frames of photographs and their drawings; return the table of both."""
    for folder in ("frames", "drawings"):
        (DATA / folder).mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        image = photograph(name)
        drawing = painted(image)
        for y in np.linspace(0, image.shape[0] - SIDE, grid).astype(int).tolist():
            for x in np.linspace(0, image.shape[1] - SIDE, grid).astype(int).tolist():
                row = {"photograph": name, "x": x, "y": y}
                for kind, pixels in (("frames", image), ("drawings", drawing)):
                    row[kind] = f"data/{kind}/{name}-{x}-{y}.png"
                    imsave(DATA.parent / row[kind], pixels[y : y + SIDE, x : x + SIDE], check_contrast=False)
                rows.append(row)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, DATA / "frames.parquet")
    return table


if __name__ == "__main__":
    sys.stdout.write(f"{write().num_rows:,} frames and their drawings in {DATA}\n")
