"""The times of all rows of a view that a run confirmed, stored once instead of in every row."""

from typing import Any

import msgspec
import numpy as np

Times = np.ndarray[Any, np.dtype[np.int64]]


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """The times of all rows of a view that became known early enough, in microseconds since 1970 UTC.

    Attributes:
        until: rows whose own known time is no later have the stamp's times.
    """

    until: int
    event: int
    known: int

    def apply(self, event: Times, known: Times) -> tuple[Times, Times]:
        """The times of rows under the stamp, shape (n,) each."""
        stamped = known <= self.until
        return np.where(stamped, self.event, event), np.where(stamped, self.known, known)

    def alters(self, event: Times, known: Times) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The mask, shape (n,), of rows whose times the stamp changes."""
        altered: np.ndarray[Any, np.dtype[np.bool_]]
        altered = (known <= self.until) & ((event != self.event) | (known != self.known))
        return altered
