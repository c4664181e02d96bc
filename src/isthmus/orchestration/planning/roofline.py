"""Roofline model: the minimum time of a computation on a device, and its bottleneck.

The minimum is the larger of operations / peak rate and bytes / bandwidth (Williams, Waterman and Patterson, "Roofline",
Communications of the ACM 52(4), 2009). We add a fixed overhead per call.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from isthmus.orchestration.planning.devices import Device, Precision

Bound = Literal["compute", "bandwidth", "overhead"]


@dataclass(frozen=True)
class Work:
    """Floating-point operations (a multiply-add counts as two), bytes moved, and number of sequential calls."""

    flops: float
    bytes: float
    calls: float = 1

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "intensity": self.intensity}


@dataclass(frozen=True)
class TimeEstimate:
    """Estimated seconds of work on a device: operations at the peak rate, memory traffic, and overhead of all calls.

    Work with more than `ridge` operations per byte is compute-bound; other work is memory-bound.
    """

    ridge: float
    compute: float
    bandwidth: float
    overhead: float

    @property
    def least(self) -> float:
        """Minimum seconds by the roofline model, without overhead."""
        return max(self.compute, self.bandwidth)

    @property
    def seconds(self) -> float:
        """Expected seconds, including overhead."""
        return self.least + self.overhead

    @property
    def bound(self) -> Bound:
        """Name of the largest part of the expected seconds; "overhead" if it exceeds `least`."""
        if self.overhead > self.least:
            return "overhead"
        return "compute" if self.compute >= self.bandwidth else "bandwidth"

    def as_dict(self) -> dict[str, Any]:
        return {
            "ridge": self.ridge, "bound": self.bound, "least_seconds": self.least, "overhead_seconds": self.overhead,
            "seconds": self.seconds,
        }  # fmt: skip


def roofline(work: Work, device: Device, precision: Precision, overhead: float = 0.0) -> TimeEstimate | None:
    """Estimate the time of work on a device, with `overhead` seconds per call; None if the precision is unsupported."""
    rate = device.rate(precision)
    if rate is None:
        return None
    return TimeEstimate(
        ridge=rate / device.bandwidth,
        compute=work.flops / rate,
        bandwidth=work.bytes / device.bandwidth,
        overhead=overhead * work.calls,
    )


def rows_to_ridge(flops: float, fixed: float, each: float, ridge: float) -> int | None:
    """Return the smallest number of rows in a compute-bound batch, or None if every batch is memory-bound.

    A row takes `flops` operations and `each` bytes, a batch `fixed` bytes more (the weights). See `TimeEstimate.ridge`.
    """
    gained = flops - ridge * each
    return max(1, math.ceil(ridge * fixed / gained)) if gained > 0 else None
