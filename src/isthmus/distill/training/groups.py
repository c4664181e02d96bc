"""Batches of whole groups of rows, and a check for settings that would split a group."""

from collections.abc import Sequence

import torch

from isthmus.distill.settings import TrainingSettings
from isthmus.features.errors import Problem


def whole_groups(groups: torch.Tensor, batch: int, generator: torch.Generator) -> Sequence[torch.Tensor]:
    """Return the row numbers of each batch of an epoch, such that no batch splits a group.

    `groups`, int64 (rows,), has the group number of each row. Groups come in random order; rows within a group keep
    their order. There are as many batches as without groups. A group goes whole into the batch of its last row. So
    a batch is never empty, and has fewer than twice `batch` rows. No group may have more than `batch` rows.
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
    """Return a problem for each setting (`batch`, `accumulation`) or number of processes that would split a group."""
    largest, together = int(groups.bincount().max()), "1: a group of rows stays together"
    checks = [
        ("batch", settings.batch, settings.batch >= largest, f"at least {largest}, the rows of the largest group"),
        ("accumulation", settings.accumulation, settings.accumulation == 1, together),
        ("processes", processes, processes == 1, together),
    ]
    return [Problem(f"{where}: {name}", f"{value}", expected) for name, value, holds, expected in checks if not holds]
