"""Batches that have all rows of a group, or none."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.training.groups import whole_groups
from isthmus.distill.training.loop import Training
from isthmus.features.errors import ConfigurationError
from tests.distill.tiny import SETTINGS, Tiny, cpu, line, step


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(0, 40), st.integers(0, 5))
def test_an_epoch_has_each_row_once_and_no_batch_cuts_a_group(groups: list[int], more: int, seed: int) -> None:
    numbers = torch.tensor(groups)
    batch = int(numbers.bincount().max()) + more
    parts = whole_groups(numbers, batch, torch.Generator().manual_seed(seed))
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(groups)))
    assert len(parts) == -(-len(groups) // batch)
    assert all(0 < len(part) < 2 * batch for part in parts)
    found = [set(numbers[part].tolist()) for part in parts]
    assert sum(map(len, found)) == len(set(groups))
    again = whole_groups(numbers, batch, torch.Generator().manual_seed(seed))
    assert all(torch.equal(part, same) for part, same in zip(parts, again, strict=True))


def test_an_order_of_groups_is_drawn() -> None:
    groups = torch.arange(40) // 4
    firsts = {tuple(whole_groups(groups, 8, torch.Generator().manual_seed(seed))[0].tolist()) for seed in range(20)}
    assert len(firsts) > 15


def test_a_training_goes_through_whole_groups() -> None:
    data, seen = line(), list[set[int]]()
    groups = torch.from_numpy(np.random.default_rng(0).integers(0, 12, len(data)))

    class Told:
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(set(rows.tolist()))
            return data[rows]

    def run(**settings: Any) -> None:
        chosen = replace(SETTINGS, gate=None, **settings)
        Training(Tiny(), Told(), step, chosen, cpu(), groups=groups).run()

    run(steps=8)
    assert len(seen) == 8
    for rows in seen:
        assert not {groups[row].item() for row in rows} & {groups[row].item() for row in set(range(len(data))) - rows}
    with pytest.raises(ConfigurationError, match=r"batch: 2; expected at least \d+, the rows of the largest group"):
        run(batch=2)
    with pytest.raises(ConfigurationError, match="accumulation: 2; expected 1: a group of rows stays together"):
        run(accumulation=2)
