"""As a script, a training of which a loss with weights of its own comes and goes: `MODE RESULT`."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from isthmus.distill.losses.objective import Schedule
from isthmus.distill.settings import Settings
from isthmus.distill.training.loop import Training
from tests.distill.tiny import Line, cpu, line

WEIGHTS: Mapping[str, Callable[[float], float]] = {
    "to 0": Schedule(1.0, 0.0, until=0.5),
    "from 0": lambda done: float(done >= 0.4),
    "from 0 to 0": lambda done: float(0.3 <= done < 0.7),
    "frozen": Schedule(1.0, 0.0, until=0.5),
}


class Fading(nn.Module):
    """A line, and an adapter that only the second loss uses."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.student, self.adapter, self.unused = nn.Linear(4, 1), nn.Linear(1, 1), nn.Linear(2, 2)
        self.unused.requires_grad_(mode != "frozen")
        self.student.bias.requires_grad_(mode != "frozen")

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.student(numbers)[:, 0]
        return result


def run(mode: str, rows: Line | None = None) -> tuple[Fading, list[dict[str, float]]]:
    """The trained module, and the losses of each evaluation."""
    fading = Fading(mode)

    def step(module: nn.Module, batch: Any, done: float) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        numbers, answers = batch
        found = module(numbers)
        terms = {"squares": nn.functional.mse_loss(found, answers)}
        if weight := WEIGHTS[mode](done):
            terms["adapted"] = weight * nn.functional.mse_loss(fading.adapter(found[:, None])[:, 0], answers)
        return torch.stack([*terms.values()]).sum(), {name: value.detach() for name, value in terms.items()}

    settings = Settings(steps=24, batch=16, learning_rate=0.05, weight_decay=0.1, evaluate_every=6, accumulation=2)
    return fading, Training(fading, rows or line(), step, settings, cpu()).run()


def main() -> None:
    mode, result = sys.argv[1:]
    module, history = run(mode)
    losses = torch.tensor([entry["loss"] for entry in history])
    save_file({**module.state_dict(), "losses": losses}, f"{result}.{cpu().process_index}")


if __name__ == "__main__":
    main()
