"""The confirmed times of all rows of a view, stored once instead of in every row."""

import msgspec
import numpy as np

from isthmus.features.values.columns import Ints, Mask


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """New times for rows of a view that were known by `until`; all in microseconds since 1970 UTC."""

    until: int
    event: int
    known: int

    def apply(self, event: Ints, known: Ints) -> tuple[Ints, Ints]:
        stamped = known <= self.until
        return np.where(stamped, self.event, event), np.where(stamped, self.known, known)

    def alters(self, event: Ints, known: Ints) -> Mask:
        """Return the mask, shape (n,), of rows whose times the stamp changes."""
        altered: Mask = (known <= self.until) & ((event != self.event) | (known != self.known))
        return altered
