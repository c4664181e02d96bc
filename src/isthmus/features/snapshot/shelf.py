"""The snapshots of a service in a folder: the newest one, those before it, and how to get from each of them to it.

latest              JSON, see `Latest`: written last, so it names only files that are there
DIGEST.snapshot     the newest snapshot and the last ones before it, by SHA-256
DIGEST.NEWEST.diff  from an earlier one of these to the newest, by the first 16 digits of its SHA-256
"""

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from isthmus.features.contract.contract import ViewContract
from isthmus.features.errors import DataError
from isthmus.features.files import write_atomically
from isthmus.features.snapshot.delta import difference
from isthmus.features.snapshot.file import SnapshotFile, read_snapshot

LATEST = "latest"


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which snapshot is the newest.

    Attributes:
        snapshot: SHA-256 of the file.
        number: as in its header.
        made: likewise.
        earlier: SHA-256 of those from which there is a difference, newest first.
        discloses: the features whose values it has, as view:feature, and which keys.
        tables: view to the fingerprint of the table that it shows.
    """

    snapshot: str
    number: int
    made: int
    earlier: tuple[str, ...]
    discloses: tuple[str, ...]
    tables: dict[str, str]


@dataclass(frozen=True)
class Shelf:
    """The folder of a service's snapshots."""

    folder: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time adds snapshots or removes them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def latest(self) -> Latest | None:
        """Which is the newest; None if there is none.

        Raises:
            DataError: the file is damaged.
        """
        file = self.folder / LATEST
        try:
            return msgspec.json.decode(file.read_bytes(), type=Latest)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(str(file), f"cannot be read ({error})", remedy="run `isthmus snapshot`") from error

    def before(self) -> Latest | None:
        """Which was the newest, for whoever replaces it: None also where that cannot be read any more."""
        try:
            return self.latest()
        except DataError:
            return None

    def path(self, digest: str) -> Path:
        """The file of a snapshot."""
        return self.folder / f"{digest}.snapshot"

    def snapshot(self, digest: str) -> bytes:
        """The bytes of a snapshot."""
        return self.path(digest).read_bytes()

    def delta(self, digest: str, latest: Latest) -> bytes:
        """The bytes of the difference from an earlier snapshot to the newest."""
        return (self.folder / _delta(digest, latest.snapshot)).read_bytes()

    def add(
        self,
        fresh: SnapshotFile,
        views: Sequence[ViewContract],
        keep: int,
        *,
        discloses: Sequence[str] = (),
        tables: Mapping[str, str] | None = None,
    ) -> Latest:
        """Puts a signed snapshot of these views before the others, of which `keep` stay; see `Latest`.

        A reader who holds an older `latest` may find a file gone, and reads `latest` again.
        """
        before = self.before()
        earlier = [] if before is None else [before.snapshot, *before.earlier]
        deltas = {}
        for digest in earlier[:keep]:
            # One that is gone or damaged, or of an earlier contract, leads nowhere: a device fetches the whole file.
            with suppress(DataError, FileNotFoundError):
                deltas[digest] = difference(read_snapshot(self.snapshot(digest), views), fresh)
        write_atomically(self.path(fresh.digest), fresh.data)
        for digest, delta in deltas.items():
            write_atomically(self.folder / _delta(digest, fresh.digest), delta)
        header = fresh.header
        latest = Latest(fresh.digest, header.number, header.made, tuple(deltas), tuple(discloses), dict(tables or {}))
        write_atomically(self.folder / LATEST, msgspec.json.encode(latest))
        files = {self.path(digest) for digest in (fresh.digest, *deltas)}
        files |= {self.folder / _delta(digest, fresh.digest) for digest in deltas}
        for file in self._files() - files:
            file.unlink(missing_ok=True)
        return latest

    def clear(self) -> None:
        """Removes all snapshots. Whoever calls holds the lock: its file stays, for those who wait for it."""
        (self.folder / LATEST).unlink(missing_ok=True)
        for file in self._files():
            file.unlink(missing_ok=True)

    def _files(self) -> set[Path]:
        """The snapshots and differences, and what a process that was killed has left of one."""
        return {file for form in ("*.snapshot", "*.diff", ".*.partial") for file in self.folder.glob(form)}


def _delta(digest: str, newest: str) -> str:
    return f"{digest}.{newest[:16]}.diff"
