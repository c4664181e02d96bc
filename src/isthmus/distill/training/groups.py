"""Batches of whole groups of rows, and a check for settings that would split a group."""

from collections.abc import Sequence

import torch

from isthmus.distill.settings import TrainingSettings
from isthmus.features.errors import Problem


def whole_groups(groups: torch.Tensor, batch: int, generator: torch.Generator) -> Sequence[torch.Tensor]:
    """Split shuffled rows into the batches of one training epoch, without splitting a group of rows.

    `groups`, int64 (rows,), has the group number of each row. Each returned tensor has the row indexes of a batch,
    int64. Groups come in random order, and the rows of a group keep their order. A group goes into the batch in which
    its last row falls. So no batch is empty, and each has fewer than twice `batch` rows. No group may have more than
    `batch` rows.
    """
    sizes = groups.bincount()
    order = torch.randperm(len(sizes), generator=generator)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    rows = place[groups].argsort(stable=True)
    counts = sizes[order]
    parts = ((counts.cumsum(0) - 1) // batch).repeat_interleave(counts)
    return torch.split(rows, parts.bincount().tolist())


def group_problems(groups: torch.Tensor, settings: TrainingSettings, processes: int, where: str) -> list[Problem]:
    """Return a problem for each training setting (batch, accumulation, processes) that would split a group of rows."""
    largest, together = int(groups.bincount().max()), "1: a group of rows stays together"
    checks = [
        ("batch", settings.batch, settings.batch >= largest, f"at least {largest}, the rows of the largest group"),
        ("accumulation", settings.accumulation, settings.accumulation == 1, together),
        ("processes", processes, processes == 1, together),
    ]
    return [Problem(f"{where}: {name}", f"{value}", expected) for name, value, holds, expected in checks if not holds]
