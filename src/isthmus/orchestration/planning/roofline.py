"""The least time that work takes on a device, and what limits it.

The model is that of Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009: no work is faster than its operations at the peak rate, nor than
its bytes at the bandwidth of the memory. Every call adds an overhead, however little it does.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from isthmus.orchestration.planning.devices import Device, Precision

Bound = Literal["compute", "bandwidth", "overhead"]


@dataclass(frozen=True)
class Work:
    """A piece of work.

    Attributes:
        flops: operations; a multiplication with an addition counts as two.
        bytes: moved between memory and arithmetic.
        calls: sequential calls that do the work.
    """

    flops: float
    bytes: float
    calls: float = 1

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    def as_dict(self) -> dict[str, float]:
        """As plain data."""
        return {**asdict(self), "intensity": self.intensity}


@dataclass(frozen=True)
class Estimate:
    """Work on a device.

    Attributes:
        ridge: operations per byte above which arithmetic limits, and below which memory does.
        compute: seconds of the operations at the peak rate.
        bandwidth: seconds of the bytes.
        overhead: seconds that the calls add.
    """

    ridge: float
    compute: float
    bandwidth: float
    overhead: float

    @property
    def least(self) -> float:
        """The least seconds under the roofline."""
        return max(self.compute, self.bandwidth)

    @property
    def seconds(self) -> float:
        """The expected seconds."""
        return self.least + self.overhead

    @property
    def bound(self) -> Bound:
        """What takes most of these seconds."""
        if self.overhead > self.least:
            return "overhead"
        return "compute" if self.compute >= self.bandwidth else "bandwidth"

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "ridge": self.ridge, "bound": self.bound, "least_seconds": self.least, "overhead_seconds": self.overhead,
            "seconds": self.seconds,
        }  # fmt: skip


def roofline(work: Work, device: Device, precision: Precision, overhead: float = 0.0) -> Estimate | None:
    """Estimates work on a device, with `overhead` seconds per call; None if the device lacks the arithmetic."""
    rate = device.rate(precision)
    if rate is None:
        return None
    return Estimate(
        ridge=rate / device.bandwidth,
        compute=work.flops / rate,
        bandwidth=work.bytes / device.bandwidth,
        overhead=overhead * work.calls,
    )


def rows_to_ridge(flops: float, fixed: float, each: float, ridge: float) -> int | None:
    """The batch size from which on arithmetic limits; None if memory limits at every size.

    Of the bytes, `fixed` are read once for the batch: the weights. `flops` and `each` are those of a row.
    """
    gained = flops - ridge * each
    return max(1, math.ceil(ridge * fixed / gained)) if gained > 0 else None
