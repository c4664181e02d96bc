"""The times of all rows of a view that one run confirmed, said once instead of in every row."""

from typing import Any

import msgspec
import numpy as np

Times = np.ndarray[Any, np.dtype[np.int64]]


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """The times of all rows of a view that became known early enough. All times are microseconds since 1970 UTC.

    Attributes:
        until: rows whose own known time is no later have the times of the stamp.
        event: their event time.
        known: their known time.
    """

    until: int
    event: int
    known: int

    def apply(self, event: Times, known: Times) -> tuple[Times, Times]:
        """The times of rows, shape (n,) each, as they are under the stamp."""
        stamped = known <= self.until
        return np.where(stamped, self.event, event), np.where(stamped, self.known, known)

    def alters(self, event: Times, known: Times) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which rows, shape (n,), would not keep their own times under the stamp."""
        altered: np.ndarray[Any, np.dtype[np.bool_]]
        altered = (known <= self.until) & ((event != self.event) | (known != self.known))
        return altered
