"""The generator learns what the effect does to photographs, once: what it has learned is kept on disk by its recipe."""

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
"""Of a frame: its photograph, and its upper left corner."""


class Crops:
    """Parts of frames, drawn anew each time, and what the effect makes of them."""

    def __init__(self, places: Sequence[Place], side: int) -> None:
        self.places, self.side = places, side

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Both (n, 3, side, side), 0 to 1."""
        corners = torch.randint(SIDE - self.side + 1, (len(rows), 2)).tolist()
        pairs = []
        for row, (right, down) in zip(rows.tolist(), corners, strict=True):
            name, x, y = self.places[row]
            pairs.append([part(image, x + right, y + down, self.side) for image in (seen(name), painted(name))])
        given, wanted = zip(*pairs, strict=True)
        return torch.stack(given), torch.stack(wanted)


def taught(
    places: Sequence[Place], pixels: Sequence[str], shape: dict[str, int], settings: Settings, side: int,
    profile: TrainingProfile, folder: Path, progress: Progress,
) -> Generator:  # fmt: skip
    """A generator that draws as the effect does, from disk if it has learned before.

    Args:
        places: of the frames that it learns from.
        pixels: a digest of each.
        shape: of the generator.
        settings: of its training.
        side: of the crops.
        profile: device, precision and threads.
        folder: where generators are kept, and checkpoints while one learns.
        progress: told how far it is.
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


def step(generator: nn.Module, crops: tuple[Tensor, Tensor], done: float) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ARG001 - the loop's
    """How far what is drawn is from what the effect draws; squared, so that ink counts, which is little and dark."""
    given, wanted = crops
    loss = mse_loss(generator(given), wanted)
    return loss, {"squares": loss.detach()}


def seen(name: str) -> Tensor:
    """A photograph, (3, height, width) uint8."""
    return torch.from_numpy(photograph(name)).permute(2, 0, 1)


def part(image: Tensor, x: int, y: int, side: int = SIDE) -> Tensor:
    """A square of an image (3, height, width), with numbers 0 to 1."""
    square = image[:, y : y + side, x : x + side]
    return square.float() / 255 if square.dtype == torch.uint8 else square
