"""Write data/gallery.png: frame, effect, teacher and student from left to right: `python gallery.py FOLDER`.

FOLDER is a student's folder, as printed by `isthmus distill`. The teacher is the one trained last.
"""

import sys
from pathlib import Path

import torch
from effects import FOLDER, Effects
from networks import Generator, Painter
from painting import painted
from safetensors.torch import load_file
from skimage.io import imsave
from teaching import part, seen
from torch import Tensor, nn

FRAMES = [("coffee", 150, 20), ("china", 100, 20), ("china", 0, 150), ("coffee", 300, 140)]
"""Frames of photographs that no network was trained on."""


def main(student: Path) -> None:
    """Write one row per frame."""
    generators = sorted(FOLDER.glob("generator-*.safetensors"), key=lambda file: file.stat().st_mtime)
    networks = [
        filled(Generator(**Effects.generator_shape), generators[-1]),
        filled(Painter(**Effects.shape), student / "student.safetensors"),
    ]
    rows = []
    for name, x, y in FRAMES:
        frame = part(seen(name), x, y)
        rows.append(torch.cat([frame, part(painted(name), x, y), *(drawn(one, frame) for one in networks)], dim=2))
    file = FOLDER / "gallery.png"
    imsave(file, (255 * torch.cat(rows, dim=1)).round().byte().permute(1, 2, 0).numpy())
    sys.stdout.write(f"{file}\n")


def filled(network: nn.Module, file: Path) -> nn.Module:
    network.load_state_dict(load_file(file))
    return network.eval()


def drawn(network: nn.Module, frame: Tensor) -> Tensor:
    with torch.inference_mode():
        images: Tensor = network(frame[None])
        return images[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
