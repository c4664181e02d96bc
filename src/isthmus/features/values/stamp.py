"""The times of all rows of a view that a run confirmed, stored once instead of in every row."""

import msgspec
import numpy as np

from isthmus.features.values.columns import Ints, Mask


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """The times of all rows of a view that became known early enough, in microseconds since 1970 UTC.

    Attributes:
        until: rows whose own known time is no later have the stamp's times.
    """

    until: int
    event: int
    known: int

    def apply(self, event: Ints, known: Ints) -> tuple[Ints, Ints]:
        """The times of rows under the stamp, shape (n,) each."""
        stamped = known <= self.until
        return np.where(stamped, self.event, event), np.where(stamped, self.known, known)

    def alters(self, event: Ints, known: Ints) -> Mask:
        """The mask, shape (n,), of rows whose times the stamp changes."""
        altered: Mask = (known <= self.until) & ((event != self.event) | (known != self.known))
        return altered
