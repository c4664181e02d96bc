"""Train the teacher on the drawings of the training photographs: `python generator.py`, after `photographs.py`.

Writes data/generator.safetensors. `isthmus distill` calls `teacher`, and `features` for the perceptual loss.
"""

import sys

import numpy as np
import pyarrow.parquet as pq
import torch
from definitions import SIDE, SPLIT
from photographs import DATA
from safetensors.torch import load_file, save_file
from skimage.io import imread
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from isthmus.tasks import split_by_value

FILE = DATA / "generator.safetensors"
WIDTH, BLOCKS = 24, 5
"""Channels at full size, and residual blocks at a quarter of the size."""
STEPS, BATCH, CROP, RATE = 300, 16, 64, 1.5e-3
"""Crops are small, so that a batch covers more frames."""
CLEAR = 3.0  # logit of no ink, the initial output


class Generator(nn.Module):
    """A residual generator (Johnson, Alahi and Fei-Fei, 2016, arXiv:1603.08155) that draws on a photograph.

    It has no normalization, which would mix a whole frame; blocks are initialized as identities instead. Skip
    connections are as in a U-Net.
    """

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.down = nn.Sequential(
            convolved(3, width, 9), convolved(width, 2 * width, stride=2), convolved(2 * width, 4 * width, stride=2)
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(convolved(4 * width, 4 * width), begun(nn.Conv2d(4 * width, 4 * width, 3, padding=1)))
            for _ in range(blocks)
        )
        self.up = nn.ModuleList([convolved(4 * width, 2 * width), convolved(2 * width, width)])
        self.strokes = begun(nn.Conv2d(width, 4, 9, padding=4))

    def forward(self, image: Tensor) -> Tensor:
        """Draw images (n, 3, height, width) in [0, 1]; sides must be multiples of 4. The result has the same shape."""
        full = self.down[0](image - 0.5)
        half = self.down[1](full)
        states = self.down[2](half)
        for block in self.blocks:
            states = states + block(states)
        for layer, across in zip(self.up, (half, full), strict=True):
            states = layer(interpolate(states, scale_factor=2.0)) + across
        strokes = self.strokes(states)
        return (image + strokes[:, :3]).clamp(0, 1) * torch.sigmoid(strokes[:, 3:] + CLEAR)


def convolved(channels: int, out: int, size: int = 3, *, stride: int = 1) -> nn.Sequential:
    """Return a convolution, padded to keep the size (divided by the stride), followed by ReLU."""
    layer = nn.Conv2d(channels, out, size, stride, size // 2)
    nn.init.kaiming_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, nn.ReLU())


def begun(layer: nn.Conv2d) -> nn.Conv2d:
    """Set the weights to zero and return the layer (Fixup; Zhang, Dauphin and Ma, 2019, arXiv:1901.09321)."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def teacher() -> Generator:
    """Return the trained generator, frozen."""
    generator = Generator()
    generator.load_state_dict(load_file(FILE))
    return generator.eval().requires_grad_(requires_grad=False)


def features() -> nn.Sequential:
    """Return its first two layers."""
    return teacher().down[:2].eval()


def main(threads: int = 2) -> None:
    """Train on random crops. The squared error gives weight to ink, which is rare and dark."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    table = pq.read_table(DATA / "frames.parquet")
    pairs = table.take(split_by_value(table["photograph"], SPLIT).train).select(["frames", "drawings"])
    images = np.array([[imread(DATA.parent / file) for file in column.to_pylist()] for column in pairs.columns])
    generator = Generator()
    optimizer = torch.optim.AdamW(generator.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for step in range(STEPS):
        places = draw.integers(0, [len(pairs), SIDE - CROP + 1, SIDE - CROP + 1], (BATCH, 3))
        crops = [images[:, row, top : top + CROP, left : left + CROP] for row, left, top in places]
        seen, wanted = torch.from_numpy(np.stack(crops, 1)).permute(0, 1, 4, 2, 3).float() / 255
        loss = mse_loss(generator(seen), wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(generator.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 24:
            sys.stdout.write(f"step {step + 1} of {STEPS}: squared error {loss.item():.5f}\n")
    save_file(generator.state_dict(), FILE)


if __name__ == "__main__":
    main()
