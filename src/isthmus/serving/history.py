"""The history of a deployment file: what was put behind the API, when, under which contract and why."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from isthmus.features.errors import DataError, DependencyError
from isthmus.serving.deployment import Deployment

Action = Literal["deploy", "promote", "rollback", "shadow", "canary", "drop", "refuse"]
"""The first three put something in force; the others are about a candidate."""


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the history.

    Attributes:
        at: microseconds since 1970 UTC.
        action: what was done.
        deployment: what it was done with.
        why: the reason, in words.
    """

    at: int
    action: Action
    deployment: Deployment
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """What is told of it."""
        one = self.deployment
        return {
            "at": self.at, "action": self.action, "model": one.model, "digest": one.digest,
            "contract": one.contract, "precision": one.precision, "why": self.why,
        }  # fmt: skip


class History:
    """The file beside a deployment file: a line for each event, added at once and never changed."""

    def __init__(self, deployment: Path) -> None:
        self._file = deployment.with_name("deployments.jsonl")

    @contextmanager
    def held(self) -> Iterator[list[Event]]:
        """What has happened so far; within the block nobody else deploys here.

        Raises:
            DependencyError: another process is deploying here.
            DataError: a line is no such record.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # The system gives the lock back, however the process ends.
        with self._file.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DependencyError(
                    str(self._file), "another deployment is under way here", remedy="wait until it is done"
                ) from error
            content = self._file.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                # Whoever wrote it was killed, or the disk was full.
                os.truncate(self._file, len(whole))
            yield self._events(whole)

    def read(self) -> list[Event]:
        """What has happened so far.

        Raises:
            DataError: a line is no such record.
        """
        try:
            content = self._file.read_bytes()
        except FileNotFoundError:
            return []
        return self._events(content[: content.rfind(b"\n") + 1])

    def _events(self, whole: bytes) -> list[Event]:
        events = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                events.append(msgspec.json.decode(line, type=Event))
            except msgspec.MsgspecError as error:
                raise DataError(
                    f"{self._file}, line {number}", f"cannot be read: {error}", expected="an event",
                    remedy="remove that line: the deployment itself is another file",
                ) from error  # fmt: skip
        return events

    def add(self, event: Event) -> None:
        """Adds a line, which is on disk when this returns."""
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def standing(events: Sequence[Event]) -> list[Deployment]:
    """What a rollback may go back through, the newest last: what was rolled back from is no longer among it."""
    found: list[Deployment] = []
    for event in events:
        if event.action not in ("deploy", "promote", "rollback"):
            continue
        places = [n for n, one in enumerate(found) if one.runs == event.deployment.runs]
        if event.action == "rollback" and places:
            del found[places[-1] :]
        elif found and found[-1].runs == event.deployment.runs:
            found.pop()
        found.append(event.deployment)
    return found
