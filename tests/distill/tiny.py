"""A module that takes a moment to train, with dropout; as a script, a run of it that can be killed."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

from isthmus.distill.accelerator import accelerator
from isthmus.distill.settings import Settings
from isthmus.distill.training.loop import Outcome, Training
from isthmus.features.profiles import TrainingProfile

ROWS = 50


class Tiny(nn.Module):
    """Four numbers to one, through eight units."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of (n, 4), (n,)."""
        result: torch.Tensor = self.layers(numbers)[:, 0]
        return result


@dataclass
class Line:
    """Rows whose answer is known: numbers (n, 4) and their answers (n,)."""

    numbers: torch.Tensor
    answers: torch.Tensor

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.numbers[rows], self.answers[rows]


def line(rows: int = ROWS) -> Line:
    numbers = torch.randn(rows, 4, generator=torch.Generator().manual_seed(2))
    return Line(numbers, numbers @ torch.tensor([1.0, -2.0, 0.5, 0.0]))


def step(module: nn.Module, batch: Any, _done: float) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    numbers, answers = batch
    loss = nn.functional.mse_loss(module(numbers), answers)
    return loss, {"squares": loss.detach()}


def evaluate(module: nn.Module) -> dict[str, float]:
    data = line()
    return {"error": nn.functional.mse_loss(module(data.numbers), data.answers).item()}


def cpu() -> Accelerator:
    return accelerator(TrainingProfile())


SETTINGS = Settings(
    steps=30, batch=16, learning_rate=0.05, clip=5.0, gate="error", best="min", evaluate_every=7, checkpoint_steps=1
)


def run(
    folder: Path | None, steps: int, heard: TextIO | None = None, dropout: float = 0.3, patience: int = 0
) -> Outcome:
    """A training, over; the number of each of its steps is written to `heard`.

    With `patience`, it improves in three evaluations if the first process evaluates, and in one if another does.
    """
    joined, how = cpu(), replace(SETTINGS, steps=steps)
    values = iter([3.0, 2.0, 1.0] if joined.process_index == 0 else [1.0])

    def spoken(module: nn.Module, batch: Any, done: float) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        if heard:
            heard.write(f"{round(done * steps)}\n")
            heard.flush()
        return step(module, batch, done)

    def counted(_module: nn.Module) -> dict[str, float]:
        return {"error": next(values, 5.0)}

    measure = counted if patience else evaluate
    if patience:
        how = replace(how, patience=patience, evaluate_every=2)
    return Training(Tiny(dropout), line(), spoken, how, joined, measure, folder).train()


def main() -> None:
    """`FOLDER RESULT STEPS [DROPOUT PATIENCE]`: the last weights go to RESULT, a file per process, unless it is `-`."""
    folder, result, steps, *options = sys.argv[1:]
    dropout, patience = options or ("0.3", "0")
    outcome = run(Path(folder), int(steps), sys.stdout, float(dropout), int(patience))
    if result != "-":
        save_file(outcome.module.state_dict(), f"{result}.{cpu().process_index}")


if __name__ == "__main__":
    main()
