"""How long work takes at least on a device, and what keeps it from being done sooner.

The model is that of Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009: no work is done faster than its operations at the peak rate, nor
than its bytes at the bandwidth of the memory. Beside it stands what every call costs however little it does.
"""

import math
from dataclasses import dataclass
from typing import Literal

from isthmus.orchestration.planning.devices import Device, Precision

Bound = Literal["compute", "bandwidth", "overhead"]


@dataclass(frozen=True)
class Work:
    """What is to be done.

    Attributes:
        flops: operations, a multiplication and an addition being two.
        bytes: that go between memory and arithmetic.
        calls: in how many pieces, one after the other.
    """

    flops: float
    bytes: float
    calls: float = 1

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Estimate:
    """Work on a device.

    Attributes:
        ridge: operations per byte from which on the arithmetic, and no more the memory, is what limits.
        compute: seconds of the operations at the peak rate.
        bandwidth: seconds of the bytes.
        overhead: seconds that the calls cost beside that.
    """

    ridge: float
    compute: float
    bandwidth: float
    overhead: float

    @property
    def least(self) -> float:
        """Seconds below which the roofline lets nothing go."""
        return max(self.compute, self.bandwidth)

    @property
    def seconds(self) -> float:
        """Seconds that are expected."""
        return self.least + self.overhead

    @property
    def bound(self) -> Bound:
        """What most of these seconds are."""
        if self.overhead > self.least:
            return "overhead"
        return "compute" if self.compute >= self.bandwidth else "bandwidth"


def roofline(work: Work, device: Device, precision: Precision, overhead: float = 0.0) -> Estimate | None:
    """Work on a device; None if it has no such arithmetic.

    Args:
        work: what is to be done.
        device: where.
        precision: of the operations.
        overhead: seconds of each call beside its work.
    """
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
    """How many rows must be answered together until arithmetic limits; None if no number is enough.

    Args:
        flops: operations of a row.
        fixed: bytes that are read once, however many rows there are: the weights.
        each: bytes of a row.
        ridge: of the device, in operations per byte.
    """
    gained = flops - ridge * each
    return max(1, math.ceil(ridge * fixed / gained)) if gained > 0 else None
