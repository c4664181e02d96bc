"""Compare the training loop with a bare PyTorch loop that takes the same steps, in one run.

A student the size of the flights example's learns from as many random rows as that example has. Both loops use the same
network, loss, batches, fused AdamW, schedule and evaluations, and keep the best weights. The bare loop does nothing
else, and checks the loss once per epoch. Ours runs without a folder, and with one, in which it writes event files and a
final checkpoint. The sides alternate on one thread, each round starting with another one. The result is the median of
the rounds' ratios of CPU time, because other load affects neighbors alike, with its 95 % interval from order
statistics, which assumes no distribution.

Run it on an idle machine.
"""

import copy
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from result import less, options_parser, report
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from isthmus.distill.accelerator import accelerator
from isthmus.distill.evaluation.metrics import auc
from isthmus.distill.settings import Settings
from isthmus.distill.training.loop import Training
from isthmus.features.profiles import TrainingProfile

BAR = round(1 / 1.05, 3)
"""Target ratio: our loop may take 1.05 times as long."""
INPUTS, EPOCHS, BATCH, RATE = 110, 4, 1024, 2e-3
GATE = "validation_auc"


@dataclass(frozen=True)
class Examples:
    """Rows: numbers (n, INPUTS), labels (n,), and the teacher's logits (n,)."""

    numbers: torch.Tensor
    labels: torch.Tensor
    teacher: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: torch.Tensor) -> "Examples":
        return Examples(self.numbers[rows], self.labels[rows], self.teacher[rows])


class Network(nn.Module):
    """A network with as many weights as the student of the flights example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(32, 1),
        )  # fmt: skip

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(numbers)[:, 0]
        return logits


def main() -> int:
    parser = options_parser(__doc__, "half of the rows")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    rounds, rows = options.rounds, 114_500 if options.quick else 229_000
    torch.set_num_threads(1)
    learning, validation = random_rows(rows), random_rows(rows // 7)
    with TemporaryDirectory() as folder:
        sides: dict[str, Callable[[Path], float]] = {
            "alone": lambda _folder: ours(learning, validation, None),
            "files": lambda fresh: ours(learning, validation, fresh),
            "bare": lambda _folder: bare(learning, validation),
        }
        times = timed(sides, rounds, Path(folder))
    case, peer = f"{EPOCHS} epochs of {rows:,} rows, batches of {BATCH:,}", "a bare PyTorch loop"
    usual, comparisons = median(times["bare"]), []
    for name, shown in (("alone", case), ("files", f"{case}, with event files and a checkpoint")):
        ratios = sorted(one / other for one, other in zip(times[name], times["bare"], strict=True))
        low, high = interval(ratios)
        sys.stderr.write(f"{shown}: {median(ratios):.3f} times the bare loop ({low:.3f} to {high:.3f})\n")
        comparisons.append(less(shown, "CPU s", usual * median(ratios), usual, peer, BAR))
    return report("distill", comparisons, as_json=options.json, quick=options.quick)


def random_rows(rows: int) -> Examples:
    """Return random rows whose label depends on their numbers, and a teacher that knows its probability."""
    chance = torch.Generator().manual_seed(rows)
    numbers = torch.randn(rows, INPUTS, generator=chance)
    logits = numbers[:, :20].sum(1) / 4
    labels = (torch.rand(rows, generator=chance) < torch.sigmoid(logits)).float()
    return Examples(numbers, labels, logits)


def combined_loss(logits: torch.Tensor, batch: Examples) -> torch.Tensor:
    """Return the loss of both loops, the same as in the flights example."""
    hard = cross_entropy(logits, batch.labels)
    soft = cross_entropy(logits / 2, torch.sigmoid(batch.teacher / 2)) * 4
    return 0.3 * hard + 0.7 * soft


def evaluate(module: nn.Module, validation: Examples) -> float:
    scores = module(validation.numbers).numpy()
    return auc(validation.labels.numpy(), scores)


def ours(learning: Examples, validation: Examples, folder: Path | None) -> float:
    def step(module: nn.Module, batch: Examples, _done: float) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return combined_loss(module(batch.numbers), batch), {}

    settings = Settings(epochs=EPOCHS, batch=BATCH, learning_rate=RATE, weight_decay=1e-2, gate=GATE)
    training = Training(
        Network(), learning, step, settings, accelerator(TrainingProfile()),
        lambda module: {GATE: evaluate(module, validation)}, folder,
    )  # fmt: skip
    return max(entry[GATE] for entry in training.run())


def bare(learning: Examples, validation: Examples) -> float:
    module, best, best_score = Network(), {}, -1.0
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=1e-2, fused=True)
    steps = EPOCHS * math.ceil(len(learning) / BATCH)
    settings = Settings(steps=steps)
    number = 0
    for _ in range(EPOCHS):
        module.train()
        total = torch.zeros(())
        for rows in torch.randperm(len(learning)).split(BATCH):  # type: ignore[no-untyped-call]
            batch = learning[rows]
            loss = combined_loss(module(batch.numbers), batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.param_groups[0]["lr"] = RATE * settings.rate(number, steps)
            optimizer.step()
            total += loss.detach()
            number += 1
        module.eval()
        with torch.inference_mode():
            score = evaluate(module, validation)
        if not math.isfinite(total.item()):
            raise SystemExit("the loss is not finite")
        if score > best_score:
            best, best_score = copy.deepcopy(module.state_dict()), score
    module.load_state_dict(best)
    return best_score


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of ordered numbers (normal approximation of the binomial)."""
    count = len(ordered)
    reach = 1.96 * math.sqrt(count) / 2
    return ordered[max(0, math.floor(count / 2 - reach))], ordered[min(count - 1, math.ceil(count / 2 + reach) - 1)]


def timed(sides: Mapping[str, Callable[[Path], float]], rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return the CPU seconds of each side in each round; exit if the sides reach different AUCs."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    reached, order = {}, list(sides)
    for number in range(rounds + 1):
        for name in order:
            fresh = folder / f"{name}-{number}"
            began = time.process_time()
            reached[name] = sides[name](fresh)
            if number:  # the first round loads libraries
                seconds[name].append(time.process_time() - began)
        order.append(order.pop(0))
    if max(reached.values()) - min(reached.values()) > 0.01:
        raise SystemExit(f"the sides reached different AUCs: {reached}")
    sys.stderr.write(f"AUC: {reached}\n")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
