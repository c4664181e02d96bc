"""The snapshots of a service in a folder: the newest one, those before it, and how to get from each of them to it.

latest              JSON, see `Latest`: written last, so it names only files that are there
DIGEST.snapshot     the newest snapshot and the last ones before it, by SHA-256
DIGEST.NEWEST.diff  from an earlier one of these to the newest, by the first 16 digits of its SHA-256
DIGEST.owners       instead of both, where each owner has a file: all of them (`owners`), the newest and the last ones
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError
from isthmus.features.files import move_atomically, write_atomically
from isthmus.package.snapshot.delta import difference
from isthmus.package.snapshot.file import SnapshotFile, read_snapshot
from isthmus.package.snapshot.owners import Generation, Lines, Owner, OwnFile, open_owners, write_owners

LATEST = "latest"


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which snapshot is the newest.

    Attributes:
        snapshot: SHA-256 of the file; of the file of all owners, where each has one.
        number: as in its header.
        made: likewise.
        earlier: SHA-256 of those from which there is a difference, newest first; of all that are kept, of owners.
        discloses: the features whose values it has, as view:feature, and which keys.
        tables: view to the fingerprint of the table that it shows.
        owner: name and type of the join key of which each owner has a file; None where there is one for all.
    """

    snapshot: str
    number: int
    made: int
    earlier: tuple[str, ...]
    discloses: tuple[str, ...]
    tables: dict[str, str]
    owner: Owner | None = None


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
        """The bytes of a snapshot.

        Raises:
            DataError: the file has another SHA-256 than its name.
        """
        path = self.path(digest)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if _sha256(path, status.st_ino, status.st_ctime_ns, status.st_size) != digest:
                raise DataError(str(path), "is damaged: its SHA-256 differs", remedy="run `isthmus snapshot`")
            return file.read()

    def delta(self, digest: str, latest: Latest) -> bytes:
        """The bytes of the difference from an earlier snapshot to the newest."""
        return (self.folder / _delta(digest, latest.snapshot)).read_bytes()

    def owners(self, digest: str) -> Path:
        """The file of all owners' files of a snapshot."""
        return self.folder / f"{digest}.owners"

    def own(self, key: bytes, latest: Latest, since: str | None = None) -> tuple[str, bytes] | None:
        """SHA-256 of an owner's newest file, and its bytes; None if it has no rows.

        Of a device that has `since`, the bytes of the difference from it, if it is kept, and none if it is the newest.
        """
        with open_owners(self.owners(latest.snapshot)) as owners:
            newest = owners.file(key)
        if newest is None:
            return None
        if since == newest.digest:
            return newest.digest, b""
        for digest in latest.earlier if since else ():
            # One that is gone or damaged leads nowhere: a device fetches the whole file.
            with suppress(DataError, FileNotFoundError), open_owners(self.owners(digest)) as owners:
                before = owners.file(key)
                if before is not None and before.digest == since:
                    return newest.digest, difference(before, newest)
        return newest.digest, newest.data

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
        files = {self.path(digest) for digest in (fresh.digest, *deltas)}
        return self._lead(latest, files | {self.folder / _delta(digest, fresh.digest) for digest in deltas})

    def add_owners(  # noqa: PLR0913 - the parts of a snapshot, by name
        self,
        generation: Generation,
        own: Mapping[bytes, Sequence[Lines]],
        sign: Callable[[bytes], bytes],
        keep: int,
        *,
        discloses: Sequence[str] = (),
        tables: Mapping[str, str] | None = None,
        signed: Callable[[bytes, OwnFile], None] = lambda _key, _file: None,
    ) -> Latest:
        """Like `add`, where each owner has a file: `signed` hears of each, with the key of its owner."""
        before = self.before()
        earlier = [] if before is None or before.owner != generation.owner else [before.snapshot, *before.earlier]
        kept = [digest for digest in earlier[:keep] if self.owners(digest).exists()]
        partial = self.folder / f".owners.{os.getpid()}.partial"
        partial.unlink(missing_ok=True)
        try:
            for key, file in write_owners(partial, generation, own.items(), sign):
                signed(key, file)
            with partial.open("rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            move_atomically(partial, self.owners(digest))
        except BaseException:
            # On a full disk, the partial file must not stay.
            partial.unlink(missing_ok=True)
            raise
        header = generation.header
        latest = Latest(
            digest, header.number, header.made, tuple(kept), tuple(discloses), dict(tables or {}), generation.owner
        )
        return self._lead(latest, {self.owners(each) for each in (digest, *kept)})

    def _lead(self, latest: Latest, files: set[Path]) -> Latest:
        """Makes it the newest, and removes what is of none any more."""
        write_atomically(self.folder / LATEST, msgspec.json.encode(latest))
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
        return {file for form in ("*.snapshot", "*.diff", "*.owners", ".*.partial") for file in self.folder.glob(form)}


@lru_cache(256)
def _sha256(path: Path, *_state: int) -> str:
    # Of megabytes it takes longer than to send them. No one but root writes to a file without a change of its ctime.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _delta(digest: str, newest: str) -> str:
    return f"{digest}.{newest[:16]}.diff"
