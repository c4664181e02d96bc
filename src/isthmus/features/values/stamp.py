"""The confirmed times of all rows of a view, stored once instead of in every row."""

import msgspec
import numpy as np

from isthmus.features.values.columns import Ints, Mask


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """New event and known times for all rows that became known early enough, in microseconds since 1970 UTC.

    Attributes:
        until: latest known time of a row that gets the stamp's times.
    """

    until: int
    event: int
    known: int

    def apply(self, event: Ints, known: Ints) -> tuple[Ints, Ints]:
        """Return the event and known times of rows under the stamp, shape (n,) each."""
        stamped = known <= self.until
        return np.where(stamped, self.event, event), np.where(stamped, self.known, known)

    def alters(self, event: Ints, known: Ints) -> Mask:
        """Return the mask, shape (n,), of rows whose times the stamp changes."""
        altered: Mask = (known <= self.until) & ((event != self.event) | (known != self.known))
        return altered
