"""Roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009): minimum time of work, and its bottleneck."""

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
        return self.flops / self.bytes

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "intensity": self.intensity}


@dataclass(frozen=True)
class TimeEstimate:
    """Estimated seconds of work on a device. Above `ridge` operations per byte, the device is compute-bound."""

    ridge: float
    compute: float
    bandwidth: float
    overhead: float

    @property
    def least(self) -> float:
        return max(self.compute, self.bandwidth)

    @property
    def seconds(self) -> float:
        return self.least + self.overhead

    @property
    def bound(self) -> Bound:
        if self.overhead > self.least:
            return "overhead"
        return "compute" if self.compute >= self.bandwidth else "bandwidth"

    def as_dict(self) -> dict[str, Any]:
        return {
            "ridge": self.ridge, "bound": self.bound, "least_seconds": self.least, "overhead_seconds": self.overhead,
            "seconds": self.seconds,
        }  # fmt: skip


def roofline(work: Work, device: Device, precision: Precision, overhead: float = 0.0) -> TimeEstimate | None:
    rate = device.rate(precision)
    if rate is None:
        return None
    return TimeEstimate(
        ridge=rate / device.bandwidth,
        compute=work.flops / rate,
        bandwidth=work.bytes / device.bandwidth,
        overhead=overhead * work.calls,
    )


def rows_to_ridge(flops: float, fixed: float, bytes_per_row: float, ridge: float) -> int | None:
    """Return the smallest batch size, in rows, that is limited by computing and not by memory; None if no batch is.

    `flops` and `bytes_per_row` are operations and bytes per row. `fixed` is bytes per batch, for example of the
    weights. `ridge` is the operations per byte above which the device is limited by computing.
    """
    gained = flops - ridge * bytes_per_row
    return max(1, math.ceil(ridge * fixed / gained)) if gained > 0 else None
