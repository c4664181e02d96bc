"""The parts of a batch, which are computed one after the other to save memory, or in several processes."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, distributed, nn

from isthmus.features.errors import DependencyError

Stepped = tuple[Tensor, Mapping[str, Tensor]]
Step = Callable[[nn.Module, Any, float], Stepped]
"""Maps the module, a batch and the finished share of training to the loss, a mean over rows, and to its
detached terms by name.
"""


class TrainingRows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, rows: Tensor, /) -> Any:
        """Return the rows at these indexes, int64 (n,) on the CPU, as a batch on the training device."""


class Parts:
    """The parts into which a process divides its share of a batch.

    Attributes:
        rows: row indexes of the whole batch, over all processes.
        shares: number of rows of each process.
        indexes: row indexes of each part of this process, `rank`.
        single: True if the batch has a single part.
        empty: True if this process has no rows. Its part is then a row that must not count, since the other processes
            wait for its gradients.
    """

    def __init__(self, rows: Tensor, accumulation: int, processes: int = 1, rank: int = 0) -> None:
        shares = rows.tensor_split(processes)
        self.rows, self.shares, share = rows, [*map(len, shares)], shares[rank]
        # The same number in all processes, which may have to run each part at the same time.
        least = max(1, min(self.shares))
        self.indexes = share.tensor_split(min(accumulation, least)) if len(share) else (rows[:1],)
        self._places = [*accumulate(map(len, self.indexes), initial=sum(self.shares[:rank]))]
        self.single, self.empty = len(self.shares) == len(self.indexes) == 1, not len(share)

    def slices(self) -> Iterator[slice]:
        """Return the position of each part in `rows`."""
        return iter([slice(0, 1)]) if self.empty else (slice(*pair) for pair in pairwise(self._places))

    def gather(self, share: Tensor) -> Tensor:
        """Return the rows of all processes, from the rows of this process on the first axis of a tensor."""
        if len(self.shares) == 1:
            return share
        padded = share.new_zeros(max(self.shares), *share.shape[1:])
        if not self.empty:
            padded[: len(share)] = share
        gathered = [torch.empty_like(padded) for _ in self.shares]
        distributed.all_gather(gathered, padded)
        return torch.cat([rows[:count] for rows, count in zip(gathered, self.shares, strict=True)])

    def total(self, counts: list[Tensor]) -> Tensor:
        """Return the sum of a tensor over all parts and processes, from its value for each part of this process."""
        total = torch.stack(counts).sum(0) * (not self.empty)
        if len(self.shares) > 1:
            distributed.all_reduce(total)
        return total


@runtime_checkable
class SplitStep(Protocol):
    """A step that computes the loss of a batch from its parts.

    Attributes:
        whole: True if the loss sees the rows of all parts together, so that a group of rows may lie in several parts.
    """

    @property
    def whole(self) -> bool: ...

    def split(self, module: nn.Module, data: TrainingRows, parts: Parts, done: float, /) -> Iterator[Stepped]:
        """Return, for each part, a scalar with the part's share of the gradient, and its share of loss and terms."""


def losses(step: Step, module: nn.Module, data: TrainingRows, parts: Parts, done: float) -> Iterator[Stepped]:
    """Return a scalar for each part of a batch, whose gradients add up to the gradient of the batch over all processes.

    Call `backward` on each scalar before you take the next one. The mapping has the part's share of the values to log:
    of each term, and of the "loss".
    """
    if not parts.single and isinstance(step, SplitStep):
        yield from step.split(module, data, parts, done)
        return
    for part in parts.indexes:
        loss, terms = step(module, data[part], done)
        values = {**terms, "loss": loss.detach()}
        weight = 0.0 if parts.empty else len(part) / len(parts.rows)
        # Do not multiply by 1, which takes time.
        yield (loss, values) if weight == 1 else (loss * weight, {key: value * weight for key, value in values.items()})


def require_same_step(step: int, processes: int, device: torch.device, where: str) -> None:
    """Raise a DependencyError, in all processes, unless they go on after the same step, since they share a folder."""
    if processes == 1:
        return
    own = torch.tensor([step], device=device)
    steps = [torch.empty_like(own) for _ in range(processes)]
    distributed.all_gather(steps, own)
    found = [int(each) for each in steps]
    if len({*found}) > 1:
        shown = ", ".join(f"rank {rank} after step {each}" for rank, each in enumerate(found))
        raise DependencyError(
            where, f"the processes see different checkpoints: {shown}", expected="a folder that all processes share"
        )
