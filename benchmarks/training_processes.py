"""Compare the training of a large student in two processes on two cores with one process on one core.

The student is a network of 5.5 million weights on random rows. Both sides take the same steps of the same batches
through the training loop, gloo connects the two processes, and each process has one thread. The time is that of the
steps alone, without the start of the processes. The sides alternate; the result is the ratio of their medians. The
CPU time of the process that took most of it says what remains beside other work on the machine.

Two processes add up 22 MB of gradients in each step, so a small student gains nothing: run with --width 64 to see it.
Run it on an idle machine.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from result import less, note, options_parser, report
from torch import nn

from isthmus.distill.accelerator import accelerator, threads
from isthmus.distill.settings import Settings
from isthmus.distill.training.loop import Training
from isthmus.features.profiles import TrainingProfile

BAR = 1.5
"""Target ratio: two processes on two cores take at most two thirds of the time of one on one core."""
INPUTS, WIDTH, BATCH = 128, 1600, 1024


class Rows:
    def __init__(self, count: int) -> None:
        chance = torch.Generator().manual_seed(0)
        self.numbers = torch.randn(count, INPUTS, generator=chance)
        self.wanted = self.numbers[:, :20].sum(1)

    def __len__(self) -> int:
        return len(self.wanted)

    def __getitem__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.numbers[rows], self.wanted[rows]


def main() -> int:
    parser = options_parser(__doc__, "fewer steps and rounds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--steps", type=int, help="train in this process, and print its seconds")
    options = parser.parse_args()
    if options.steps:
        sys.stdout.write(json.dumps(train(options.steps, options.width)) + "\n")
        return 0
    rounds, steps = (options.rounds or 2, 15) if options.quick else (options.rounds or 7, 40)
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for number in range(rounds):
        for processes in (1, 2) if number % 2 else (2, 1):
            run = started(processes, ["--steps", str(steps), "--width", str(options.width)])
            found[processes].append(run)
            note(f"{processes} processes: {run}")
    one, two = (found[processes][0]["loss"] for processes in (1, 2))
    if abs(one - two) > 1e-3 * one:
        raise SystemExit(f"the sides reached different losses: {one} and {two}")
    case = f"{run['weights'] / 1e6:.1f} million weights, {steps} steps of {BATCH:,} rows, 2 processes"
    comparisons = []
    for name, bar in (("s", BAR if options.width == WIDTH else None), ("CPU s", None)):
        ours, peer = (median(each[name] for each in found[processes]) for processes in (2, 1))
        comparisons.append(less(case, name, ours, peer, "1 process on 1 core", bar))
    return report("training_processes", comparisons, as_json=options.json, quick=options.quick)


def started(processes: int, arguments: list[str]) -> dict[str, float]:
    """Return the largest of each figure of the processes."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--local-addr", "127.0.0.1"]
    address = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launcher, *address, __file__, *arguments], env=environment, stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: max(each[name] for each in figures) for name in figures[0]}


def train(steps: int, width: int) -> dict[str, float]:
    """Return the seconds and CPU seconds of all steps but the first two, the number of weights, and the last loss."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 1),
    )  # fmt: skip
    began = used = 0.0

    def step(model: nn.Module, batch: Any, done: float) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        nonlocal began, used
        if round(done * (steps + 2)) == 2:
            began, used = time.perf_counter(), time.process_time()
        loss = nn.functional.mse_loss(model(batch[0])[:, 0], batch[1])
        return loss, {}

    with threads(1):
        settings = Settings(steps=steps + 2, batch=BATCH, evaluate_every=steps + 2)
        training = Training(module, Rows(20 * BATCH), step, settings, accelerator(TrainingProfile()))
        (last,) = training.run()
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    weights = sum(each.numel() for each in module.parameters())
    return {"s": seconds, "CPU s": cpu, "weights": weights, "loss": last["loss"]}


if __name__ == "__main__":
    sys.exit(main())
