"""Batches of whole groups of rows, and a check for settings that would split a group."""

from collections.abc import Sequence

import torch

from isthmus.distill.settings import TrainingSettings
from isthmus.features.errors import Problem


def whole_groups(groups: torch.Tensor, batch: int, generator: torch.Generator) -> Sequence[torch.Tensor]:
    """Shuffle rows and split them into the batches of one training epoch, with all rows of a group in the same batch.

    `groups`, int64 (rows,), has the group number of each row. `batch` is the intended number of rows per batch, and
    must be at least the size of the largest group. Returns a tensor of row indexes, int64, for each batch. A group goes
    into the batch in which its last row falls, so no batch is empty, and each has fewer than twice `batch` rows.
    """
    sizes = groups.bincount()
    order = torch.randperm(len(sizes), generator=generator)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    rows = place[groups].argsort(stable=True)
    counts = sizes[order]
    parts = ((counts.cumsum(0) - 1) // batch).repeat_interleave(counts)
    return torch.split(rows, parts.bincount().tolist())


def group_problems(
    groups: torch.Tensor, settings: TrainingSettings, processes: int, where: str, *, whole: bool
) -> list[Problem]:
    """Check that the settings never split a group; return a list of problems.

    `whole` is True if the loss sees all parts of a batch together (see `SplitStep`), so that a part may split a group.
    """
    largest, together = int(groups.bincount().max()), "1: a group of rows stays together"
    checks = [
        ("batch", settings.batch, settings.batch >= largest, f"at least {largest}, the rows of the largest group"),
        ("accumulation", settings.accumulation, whole or settings.accumulation == 1, together),
        ("processes", processes, whole or processes == 1, together),
    ]
    return [Problem(f"{where}: {name}", f"{value}", expected) for name, value, holds, expected in checks if not holds]
