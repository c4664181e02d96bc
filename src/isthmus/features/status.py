"""Where a project stands, as plain data: what `isthmus status` finds, and what is kept of it for who cannot look."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features.days import day_name
from isthmus.features.errors import DataError
from isthmus.features.files import write_atomically

FILE = "status.json"
"""Beside the deployment file."""


class ViewStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A view.

    Attributes:
        rows: of its table; None if there is none.
        last_day: the last day with rows up to the project's present.
        age_days: whole days from then to the present.
        expired: whether all that it could serve is older than its ttl.
        built_at: when the table was written, in microseconds since 1970 UTC.
        current: whether the table is made of what sources and definitions are now.
        served_at: when its rows became readable online for the last time, in microseconds since 1970 UTC.
        served: whether Redis was told the table as it is now.
        broken: expectations that do not hold.
        drifted: features that are no longer like what a model learned from.
        problem: why nothing can be said of it; empty if all can.
    """

    rows: int | None = None
    last_day: str | None = None
    age_days: int | None = None
    expired: bool = False
    built_at: int | None = None
    current: bool = False
    served_at: int | None = None
    served: bool = False
    broken: tuple[str, ...] = ()
    drifted: tuple[str, ...] = ()
    problem: str = ""

    @property
    def timeless(self) -> bool:
        """Whether all rows hold from the beginning of the clock, as those of what has no times do."""
        return self.last_day == day_name(0)

    def wrong(self, *, applied: bool) -> Sequence[str]:
        """What is to be done about it, in words; nothing if it is up to date.

        Args:
            applied: whether today's definitions are in force.
        """
        if self.problem:
            return ["cannot be read"]
        if self.rows is None:
            return ["to be built"]
        found = {
            "to be built again": applied and not self.current,
            "to be materialized": not self.served,
            "expired": self.expired,
            "breaks its promises": bool(self.broken),
            "has drifted": bool(self.drifted),
        }
        return [word for word, holds in found.items() if holds]


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A distillation.

    Attributes:
        training_set: its identity; None if there is none.
        student: its identity.
        package: digest of the last package.
        stale: what of these was made under definitions that have changed since, a sentence each.
        verdict: whether the last verdict passed; None if there is none, or if it is about another package.
        compared: values that it compared.
        verified_at: when, in microseconds since 1970 UTC, by the project's clock.
        deployed: digest of the package behind the API.
        contract: hash of the contract it was made under.
        deployed_at: since when, in microseconds since 1970 UTC.
    """

    training_set: str | None = None
    student: str | None = None
    package: str | None = None
    stale: tuple[str, ...] = ()
    verdict: bool | None = None
    compared: int = 0
    verified_at: int | None = None
    deployed: str | None = None
    contract: str | None = None
    deployed_at: int | None = None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run of Dagster: what it was to make, how it ended, and when it began, in microseconds since 1970 UTC."""

    id: str
    made: str
    status: str
    at: int | None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A project.

    Attributes:
        project: its name.
        contract: hash of the contract of today's definitions.
        applied: whether it is in force.
        now: the project's present, in microseconds since 1970 UTC.
        views: by name.
        models: by name.
        runs: the last ones, the latest first.
        measured: whether expectations and drift were measured.
        found_at: when all this was found, in microseconds since 1970 UTC, by the clock on the wall.
    """

    project: str
    contract: str
    applied: bool
    now: int
    views: dict[str, ViewStatus]
    models: dict[str, ModelStatus]
    runs: list[RunStatus]
    measured: bool
    found_at: int

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def write(self, folder: Path) -> None:
        """Keeps it for the server."""
        write_atomically(folder / FILE, msgspec.json.encode(self) + b"\n")

    @classmethod
    def read(cls, folder: Path) -> "Status | None":
        """What is kept; None if nothing is.

        Raises:
            DataError: it cannot be read.
        """
        file = folder / FILE
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise DataError(str(file), f"cannot be read: {error}", remedy="run `isthmus status`") from error
