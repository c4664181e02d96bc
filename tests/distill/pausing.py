"""Trainings beside a server that is always too slow; as a script, one that pauses and can be killed."""

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from isthmus.distill.settings import Settings
from isthmus.distill.throttle import policy
from isthmus.distill.training.loop import Training
from isthmus.distill.training.parts import Step
from isthmus.features.latency import Latency
from tests.distill.tiny import cpu

STRAINED, CALM = Latency(12.0, 5.0, 1000, 11), Latency(5.0, 5.0, 1000, 10)
ROWS, STEPS = 600, 12


class Clock:
    """Seconds that pass by themselves, so many at each look, or so many times as fast; naps are real, or none."""

    def __init__(self, each: float = 0.0, times: float = 0.0, *, naps: bool = True) -> None:
        self._each, self._times, self._naps, self._passed = each, times, naps, 0.0

    def monotonic(self) -> float:
        self._passed += self._each
        return self._passed + time.monotonic() * self._times

    def sleep(self, seconds: float) -> None:
        if self._naps:
            time.sleep(seconds)


class Spent:
    """Seconds that pass only where they are spent: asleep, or by who adds to them."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Drawn:
    """A network that computes with several threads, and rows for it."""

    module: nn.Module
    inputs: torch.Tensor
    batch: int

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Any) -> torch.Tensor:
        return self.inputs[rows]


class Text(nn.Module):
    """Of the numbers of words, (n, 24)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Of (n, 24), (n, 64)."""
        vectors: torch.Tensor = self.layer(self.words(words)).mean(1)
        return vectors


def drawn(kind: str) -> Drawn:
    """A network of a kind, and its rows: always the same."""
    chance = torch.Generator().manual_seed(5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        if kind == "table":
            table = nn.Sequential(nn.Linear(110, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
            return Drawn(table, torch.randn(4 * ROWS, 110, generator=chance), 1024)
        if kind == "text":
            return Drawn(Text(), torch.randint(0, 500, (ROWS, 24), generator=chance), 64)
        image = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        )
        return Drawn(image, torch.randn(ROWS // 8, 3, 32, 32, generator=chance), 8)


def squares(module: nn.Module, batch: torch.Tensor, _done: float) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Something to learn."""
    return (module(batch) - 1).square().mean(), {}


def training(
    kind: str, heard: Any = None, folder: Path | None = None, steps: int = STEPS, *, step: Step = squares, **more: Any
) -> Training:
    """A training of a drawn network."""
    data = drawn(kind)
    how = Settings(steps=steps, batch=data.batch, learning_rate=0.01)
    return Training(data.module, data, step, how, cpu(), folder=folder, latency=heard, **more)


def hearing(strains: Iterable[bool]) -> Any:
    """Hears these, and then nothing bad any more."""
    left = iter(strains)
    return lambda: STRAINED if next(left, False) else CALM


def main() -> None:
    """`KIND FOLDER RESULT PATIENCE`: says what it is told; is strained PATIENCE looks long, then calm."""
    kind, folder, result, patience = sys.argv[1:]
    policy.time = Clock(each=6)  # type: ignore[assignment,attr-defined]

    def progress(text: str, _done: float) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    torch.set_num_threads(2)
    run = training(kind, hearing(repeat(True, int(patience))), Path(folder), 40, progress=progress)
    run.run()
    save_file(run.module.state_dict(), result)
    progress("saved", 1.0)


if __name__ == "__main__":
    main()
