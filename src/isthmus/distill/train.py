"""The training of tabular students: rows of a table, and the AUC that decides."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from isthmus.distill.account import Progress
from isthmus.distill.declaration import Distillation
from isthmus.distill.device import accelerator
from isthmus.distill.evaluate import auc
from isthmus.distill.loop import Training
from isthmus.distill.losses import distillation_loss
from isthmus.distill.settings import Settings
from isthmus.distill.student import Student
from isthmus.features.profiles import TrainingProfile

GATE = "validation_auc"

ROWS_PER_THREAD = 4096
"""A smaller share of a batch is not worth a thread: with batches of 1024 rows two threads gain nothing on two free
cores and are ten times slower when another process holds one of them."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Rows to learn from: numbers (n, f) and category indexes (n, k), labels (n,), the teacher's logits (n,)."""

    numeric: torch.Tensor
    categories: torch.Tensor
    labels: torch.Tensor
    teacher: torch.Tensor

    def to(self, device: torch.device) -> "Examples":
        """The same rows on a device."""
        return Examples(*(column.to(device) for column in self.columns))

    @property
    def columns(self) -> tuple[torch.Tensor, ...]:
        """All four."""
        return self.numeric, self.categories, self.labels, self.teacher

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: torch.Tensor) -> "Examples":
        """The rows at some indexes, on the device where all are."""
        rows = rows.to(self.labels.device)
        return Examples(self.numeric[rows], self.categories[rows], self.labels[rows], self.teacher[rows])


def train(
    student: Student,
    examples: Examples,
    validation: Examples,
    declaration: Distillation,
    profile: TrainingProfile,
    progress: Progress,
    folder: Path | None = None,
) -> list[dict[str, float]]:
    """Trains a student in place and leaves it with the weights of the epoch of best validation AUC, on the CPU.

    On one machine's CPU, the same arguments give the same weights to the bit, also if the run was stopped or killed
    and goes on from its last checkpoint in the folder (`loop.Training`).

    Returns:
        Step, mean loss and validation AUC of each epoch.

    Raises:
        DependencyError: the profile asks for what this machine lacks, or memory or the disk is full.
        GateFailed: a loss, a gradient or an answer is not finite; the student keeps the best weights it had.
        Stopped: by SIGINT or SIGTERM.
    """
    joined = accelerator(profile)
    data_id = _digest(examples, validation) if folder else ""
    examples, validation = examples.to(joined.device), validation.to(joined.device)
    labels = validation.labels.cpu().numpy()

    def step(module: nn.Module, batch: Examples, _done: float) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        logits = module(batch.numeric, batch.categories)
        loss = distillation_loss(
            logits,
            batch.labels,
            batch.teacher,
            temperature=declaration.temperature,
            soft_weight=declaration.soft_weight,
        )
        return loss, {}

    def evaluate(module: nn.Module) -> dict[str, float]:
        scores = module(validation.numeric, validation.categories).cpu().numpy()
        return {GATE: auc(labels, scores) if np.isfinite(scores).all() else math.nan}

    settings = Settings(
        epochs=profile.epochs,
        batch=profile.batch,
        learning_rate=declaration.learning_rate,
        weight_decay=declaration.weight_decay,
        gate=GATE,
        seed=declaration.seed,
    )
    where = f"distillation {declaration.name}"
    try:
        with _threads(min(profile.threads, 1 + profile.batch // ROWS_PER_THREAD)):
            return Training(student, examples, step, settings, joined, evaluate, folder, data_id, where, progress).run()
    finally:
        student.cpu()


def _digest(*parts: Examples) -> str:
    found = hashlib.sha256()
    for column in (column for part in parts for column in part.columns):
        found.update(f"{column.dtype} {tuple(column.shape)}".encode())
        found.update(column.contiguous().numpy().data)
    return found.hexdigest()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
