"""The status of a project. `isthmus status` stores it for the server, and shows it on the terminal and on a page."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features import clock
from isthmus.features.days import day_name
from isthmus.features.document.blocks import Block, Paragraph, StyledText, TableBlock, Text, bad, good
from isthmus.features.errors import DataError
from isthmus.features.files import write_atomically

FILE = "status.json"
STREAMS = "streams"
STOPPED_SECONDS = 30.0
"""Age of a stream's last state from which on it counts as stopped."""


class ViewStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a view.

    Attributes:
        last_day: last day with rows whose event time is not after the project's current time.
        age_days: full days from the last day to the project's current time.
        expired: True if all rows are older than the ttl.
        built_at: time when the table was written, in microseconds since 1970 UTC.
        current: True if the table matches today's sources and definitions.
        served_at: time when the rows last became readable online, in microseconds since 1970 UTC.
        served: True if Redis has the table's current rows.
        waiting: pushed rows that are not in the table yet; None if Redis does not run.
        waiting_since: time when Redis got the first waiting row, in microseconds since 1970 UTC, by its own clock.
        lost: reason why Redis may have lost rows of the view; empty if it has them all, or does not run.
    """

    rows: int | None = None
    last_day: str | None = None
    age_days: int | None = None
    expired: bool = False
    built_at: int | None = None
    current: bool = False
    served_at: int | None = None
    served: bool = False
    waiting: int | None = None
    waiting_since: int | None = None
    broken: tuple[str, ...] = ()
    drifted: tuple[str, ...] = ()
    lost: str = ""
    problem: str = ""

    @property
    def timeless(self) -> bool:
        return self.last_day == day_name(0)

    def wrong(self, *, applied: bool) -> Sequence[str]:
        if self.problem:
            return ["cannot be read"]
        if self.rows is None:
            return ["to be built"]
        states = {
            "to be built again": applied and not self.current,
            "to be materialized": not self.served and not self.lost,
            "has lost online rows": bool(self.lost),
            "expired": self.expired,
            "breaks expectations": bool(self.broken),
            "has drifted": bool(self.drifted),
        }
        return [word for word, holds in states.items() if holds]


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a distillation.

    Attributes:
        stale: sentences about definitions that have changed since the training set or the package was made.
        verdict: result of the last verdict; None without a verdict on this package.
        compared: number of values in the verdict.
        verified_at: time of the verdict, in microseconds since 1970 UTC, by the project's clock.
        deployed: digest of the package behind the API.
        deployed_at: time of the deployment, in microseconds since 1970 UTC.
        undone: deployment that a server rolled back to this one, and why; None without a rollback.
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
    undone: str | None = None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A Dagster run: its assets, its outcome, and its start in microseconds since 1970 UTC."""

    id: str
    made: str
    status: str
    at: int | None


class SpoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions that servers have recorded and that are not collected yet.

    Attributes:
        bytes: size of all files, including those that a server still writes.
        since: time of the oldest prediction that waits, in microseconds since 1970 UTC; None if all are collected.
    """

    bytes: int
    since: int | None


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a source's stream, which `isthmus stream` writes every second.

    Attributes:
        at: time of this state, in microseconds since 1970 UTC, by the system clock.
        watermark: time before which all events were expected to have been read, in microseconds since 1970 UTC.
        late: number of events that arrived after the watermark had passed their known time.
        unreadable: number of events in the table of unreadable events.
        events: number of events that this process has read.
        lag: number of events not read yet, by partition.
        events_per_second: rate over the last ten seconds.
        rows: number of rows that this process has written, by view.
        newest: known time of the newest row written online, by view, in microseconds since 1970 UTC.
    """

    at: int
    watermark: int
    late: int
    unreadable: int
    events: int
    lag: dict[str, int]
    events_per_second: float
    rows: dict[str, int]
    newest: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)

    def write(self, state: Path, source: str) -> None:
        write_atomically(state / STREAMS / f"{source}.json", msgspec.json.encode(self) + b"\n")

    @classmethod
    def read_all(cls, state: Path) -> "dict[str, StreamStatus]":
        """Read the states of all streams by source, from a project's state folder. Leaves out unreadable files."""
        found = {}
        for file in sorted((state / STREAMS).glob("*.json")):
            with suppress(OSError, msgspec.MsgspecError):
                found[file.stem] = msgspec.json.decode(file.read_bytes(), type=cls)
        return found


class TableSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The space of an offline table on disk.

    Attributes:
        bytes: size of all files, with those of older versions.
        growth: bytes per day since an earlier `isthmus maintain`; None before the second one, a day later.
        days_left: days until this growth fills the disk; None if unknown, or the table does not grow.
    """

    bytes: int
    files: int
    versions: int
    growth: float | None = None
    days_left: float | None = None

    def cells(self) -> Iterator[str]:
        yield from (f"{self.bytes / 1e6:,.1f}", f"{self.files:,}", f"{self.versions:,}")
        yield "unknown" if self.growth is None else f"{self.growth / 1e6:,.1f}"
        yield "unknown" if self.days_left is None else f"{self.days_left:,.0f}"


class ProjectStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a project.

    Attributes:
        applied: True if `contract` is the last applied one.
        current: hash of the contract that servers use; None if there is none yet.
        online: reason why Redis may evict rows; empty if it evicts nothing, or does not run.
        spool: recorded predictions that are not collected yet; None if servers record nothing.
        found_at: time when `isthmus status` ran, in microseconds since 1970 UTC, by the system clock.
        streams: last state of each stream that was ever read, by source.
        spaces: size of each table in the offline store, including tables of removed views; empty if not measured.
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
    current: str | None = None
    spool: SpoolStatus | None = None
    online: str = ""
    streams: dict[str, StreamStatus] = {}
    spaces: dict[str, TableSpace] = {}

    @property
    def waiting(self) -> bool:
        return self.applied and self.current not in (None, self.contract)

    def _unfinished(self, state: str) -> str:
        # The run may have ended since: say when it was in this state.
        return state if state == "canceled" else f"{state} at {minute(self.found_at)}"

    def _reading(self, stream: StreamStatus) -> StyledText:
        seconds = (self.found_at - stream.at) / 1e6
        return good("reading") if seconds < STOPPED_SECONDS else bad(f"stopped at {minute(stream.at)}")

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def write(self, folder: Path) -> None:
        write_atomically(folder / FILE, msgspec.json.encode(self) + b"\n")

    @classmethod
    def read(cls, folder: Path) -> "ProjectStatus | None":
        file = folder / FILE
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise DataError(str(file), f"cannot be read: {error}", remedy="run `isthmus status`") from error

    def screen(self) -> Iterator[Block]:
        state: Text = "applied" if self.applied else bad("not applied, run `isthmus apply`")
        if self.waiting:
            state = f"not served yet: servers use {short(self.current)} until `isthmus materialize` is done"
        now = f"; project time {minute(self.now)}"
        yield Paragraph((f"{self.project}, contract {short(self.contract)}, ", state, now))
        yield from self.blocks()

    def blocks(self) -> Iterator[Block]:
        yield TableBlock(
            ["view", "rows", "last day", "built", "online since", "state"],
            [
                [
                    name, "-" if view.rows is None else f"{view.rows:,}", _last_day(view), minute(view.built_at),
                    minute(view.served_at), _state(view.wrong(applied=self.applied)),
                ]
                for name, view in self.views.items()
            ],
            numbers=["rows"],
        )  # fmt: skip
        for name, view in self.views.items():
            yield from _problems(name, filter(None, (view.problem, view.lost, *view.broken, *view.drifted)))
        if self.online:
            yield Paragraph(bad(self.online))
        for name, view in self.views.items():
            if view.waiting:
                text = f"{view.waiting:,} pushed rows wait for the history of {name} since {minute(view.waiting_since)}"
                yield Paragraph(f"{text}. Run `isthmus pushes collect` to add them")
        if self.spool is not None and self.spool.since is not None:
            text = f"Recorded answers wait since {minute(self.spool.since)}, {self.spool.bytes / 1e6:,.1f} MB"
            yield Paragraph(f"{text}. Run `isthmus answers collect` to collect them")
        if self.streams:
            yield TableBlock(
                ["stream", "state", "not read", "events/s", "watermark", "late", "unreadable"],
                [
                    [
                        name, self._reading(stream), f"{sum(stream.lag.values()):,}",
                        f"{stream.events_per_second:,.0f}", minute(stream.watermark), f"{stream.late:,}",
                        f"{stream.unreadable:,}",
                    ]
                    for name, stream in self.streams.items()
                ],
                numbers=["not read", "events/s", "late", "unreadable"],
            )  # fmt: skip
        if self.spaces:
            yield TableBlock(
                ["table", "MB", "files", "versions", "MB/day", "days left"],
                [[name, *space.cells()] for name, space in self.spaces.items()],
                numbers=["MB", "files", "versions", "MB/day", "days left"],
            )  # fmt: skip
        if self.models:
            yield TableBlock(
                ["model", "training set", "student", "package", "verdict", "deployed"],
                [
                    [
                        name, short(model.training_set), short(model.student), short(model.package), _verdict(model),
                        _deployed(model),
                    ]
                    for name, model in self.models.items()
                ],
                code=["training set", "student", "package"],
            )  # fmt: skip
            for name, model in self.models.items():
                yield from _problems(name, filter(None, (*model.stale, model.undone)))
        if self.runs:
            colors = {"success": good, "failure": bad}
            yield TableBlock(
                ["run", "began", "state", "made"],
                [
                    [run.id[:8], minute(run.at), colors.get(run.status, self._unfinished)(run.status), run.made]
                    for run in self.runs
                ],
                code=["run"],
            )  # fmt: skip


def short(identity: str | None) -> str:
    return "-" if identity is None else identity[:12]


def minute(at: int | None) -> str:
    return "-" if at is None else f"{clock.moment(at):%Y-%m-%d %H:%M}"


def _last_day(view: ViewStatus) -> str:
    if view.last_day is None:
        return "-"
    if view.timeless:
        return "no times"
    if view.age_days is None:
        return view.last_day
    days = "today" if view.age_days == 0 else f"{view.age_days} day{'' if view.age_days == 1 else 's'} ago"
    return f"{view.last_day}, {days}"


def _state(problems: Sequence[str]) -> StyledText:
    return bad(", ".join(problems)) if problems else good("up to date")


def _verdict(model: ModelStatus) -> Text:
    if model.verdict is None:
        return "none" if model.package else "-"
    return (good("passed") if model.verdict else bad("failed"), f", {model.compared:,} values")


def _deployed(model: ModelStatus) -> str:
    if model.deployed is None:
        return "-"
    since = minute(model.deployed_at)
    return since if model.deployed == model.package else f"not the last: {short(model.deployed)} {since}"


def _problems(name: str, sentences: Iterable[str]) -> Iterator[Paragraph]:
    return (Paragraph((bad(name), f": {sentence}")) for sentence in sentences)
