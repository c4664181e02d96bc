"""Train the generator on the effect, once; the result is cached on disk by a digest of its recipe."""

from collections.abc import Sequence
from pathlib import Path

import torch
from networks import Generator
from painting import effect, painted
from photographs import SIDE, photograph
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from isthmus import Settings
from isthmus.teachers import fingerprint
from isthmus.training import Progress, Training, TrainingProfile, accelerator, discard, sha256, threads

Place = tuple[str, int, int]
"""A frame: its photograph and its top left corner."""


class Crops:
    """Random crops of frames and of their effect."""

    def __init__(self, places: Sequence[Place], side: int) -> None:
        self.places, self.side = places, side

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return crops of frames and of their effect, both (n, 3, side, side) in [0, 1]."""
        corners = torch.randint(SIDE - self.side + 1, (len(rows), 2)).tolist()
        pairs = []
        for row, (right, down) in zip(rows.tolist(), corners, strict=True):
            name, x, y = self.places[row]
            pairs.append([part(image, x + right, y + down, self.side) for image in (seen(name), painted(name))])
        images, targets = zip(*pairs, strict=True)
        return torch.stack(images), torch.stack(targets)


def taught(
    places: Sequence[Place], pixels: Sequence[str], shape: dict[str, int], settings: Settings, side: int,
    profile: TrainingProfile, folder: Path, progress: Progress,
) -> Generator:  # fmt: skip
    """Return a generator trained on the effect, from the cache if there is one.

    Args:
        places: training frames.
        pixels: digest of each frame's pixels.
        shape: arguments of `Generator`.
        settings: training settings.
        side: side of the crops, in pixels.
        profile: device, precision and threads.
        folder: folder for generators and for checkpoints during training.
        progress: callback for progress.
    """
    recipe = sha256({
        "pixels": pixels, "shape": shape, "settings": settings.identity(), "side": side,
        "code": [fingerprint(part) for part in (Generator, Crops, step, effect)], "torch": torch.__version__,
    })[:12]  # fmt: skip
    file, runs = folder / f"generator-{recipe}.safetensors", folder / f"generator-{recipe}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        generator = Generator(**shape)
    if file.exists():
        generator.load_state_dict(load_file(file))
    else:
        with threads(profile.threads):
            Training(
                generator, Crops(places, side), step, settings, accelerator(profile), folder=runs, progress=progress
            ).run()
        generator.cpu()
        save_file(generator.state_dict(), file)
        discard(runs)
    return generator.requires_grad_(False).train(False)


def step(generator: nn.Module, crops: tuple[Tensor, Tensor], done: float) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ARG001 - signature of the training loop
    """Return the mean squared error against the effect. The square gives weight to ink, which is rare and dark."""
    images, targets = crops
    loss = mse_loss(generator(images), targets)
    return loss, {"squares": loss.detach()}


def seen(name: str) -> Tensor:
    """Return a photograph, (3, height, width) uint8."""
    return torch.from_numpy(photograph(name)).permute(2, 0, 1)


def part(image: Tensor, x: int, y: int, side: int = SIDE) -> Tensor:
    """Return a square of an image (3, height, width), float in [0, 1]."""
    square = image[:, y : y + side, x : x + side]
    return square.float() / 255 if square.dtype == torch.uint8 else square
