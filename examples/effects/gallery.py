"""Write data/gallery.png: frame, effect, teacher and student from left to right: `python gallery.py PACKAGE`.

PACKAGE is the folder of a package, as printed by `isthmus model export`.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from definitions import SIDE
from generator import teacher
from photographs import DATA, painted, photograph
from skimage.io import imsave

from isthmus.inference import predict, session

FRAMES = [("coffee", 150, 20), ("china", 100, 20), ("china", 0, 150), ("coffee", 300, 140)]
"""Frames of photographs that no network was trained on."""


def main(package: Path) -> None:
    """Write one row per frame."""
    student, generator, rows = session((package / "model.fp32.ort").read_bytes(), 1), teacher(), []
    for name, x, y in FRAMES:
        image = photograph(name)
        frame, drawing = (pixels[y : y + SIDE, x : x + SIDE] / 255 for pixels in (image, painted(image)))
        fed = np.ascontiguousarray(frame.transpose(2, 0, 1), np.float32)[None]
        networks = generator(torch.from_numpy(fed)).numpy(), predict(student, {"image": fed})
        rows.append(np.concatenate([frame, drawing, *(one[0].transpose(1, 2, 0) for one in networks)], axis=1))
    imsave(DATA / "gallery.png", (255 * np.concatenate(rows)).round().astype(np.uint8))
    sys.stdout.write(f"{DATA / 'gallery.png'}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
