"""The folder of a service's snapshots (`SnapshotFolder`): the newest one, some earlier ones, and deltas to the newest.

latest              JSON, see `Latest`: written last, so it names only files that exist
DIGEST.snapshot     the newest snapshot and some earlier ones, by SHA-256
DIGEST.NEWEST.diff  delta from an earlier snapshot to the newest, by the first 16 digits of its SHA-256
DIGEST.owners       instead of both if each owner has a snapshot: the newest snapshots of all owners, or earlier ones
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
from isthmus.package.snapshot.owners import Lines, Owner, OwnFile, SharedSnapshot, open_owners, write_owners

LATEST = "latest"


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Description of the newest snapshot, with `number` and `made` from its header.

    Attributes:
        snapshot: SHA-256 of the snapshot, or of the file of all owners.
        earlier: SHA-256 of earlier snapshots with a delta to it, newest first; with owners, of all earlier files.
        discloses: features it exposes, as view:feature, and of which keys.
        tables: fingerprint of the table behind each view.
        owner: name and type of the join key if each owner has a snapshot, else None.
    """

    snapshot: str
    number: int
    made: int
    earlier: tuple[str, ...]
    discloses: tuple[str, ...]
    tables: dict[str, str]
    owner: Owner | None = None


@dataclass(frozen=True)
class SnapshotFolder:
    folder: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def latest(self) -> Latest | None:
        file = self.folder / LATEST
        try:
            return msgspec.json.decode(file.read_bytes(), type=Latest)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(str(file), f"cannot be read ({error})", remedy="run `isthmus features snapshot`") from error

    def latest_or_none(self) -> Latest | None:
        try:
            return self.latest()
        except DataError:
            return None

    def path(self, digest: str) -> Path:
        return self.folder / f"{digest}.snapshot"

    def snapshot(self, digest: str) -> bytes:
        path = self.path(digest)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if _sha256(path, status.st_ino, status.st_ctime_ns, status.st_size) != digest:
                raise DataError(str(path), "is damaged: its SHA-256 differs", remedy="run `isthmus features snapshot`")
            return file.read()

    def delta(self, digest: str, latest: Latest) -> bytes:
        return (self.folder / _delta(digest, latest.snapshot)).read_bytes()

    def owners(self, digest: str) -> Path:
        return self.folder / f"{digest}.owners"

    def owner_snapshot(self, key: bytes, latest: Latest, since: str | None = None) -> tuple[str, bytes] | None:
        """Return the SHA-256 of an owner's newest snapshot, and the bytes that update a device to it.

        `key` is the encoded join key of the owner, such as a user id. `latest` describes the newest file of snapshots,
        and `since` is the SHA-256 of the snapshot that the device has. The bytes are empty if `since` is the newest
        snapshot, a delta if an earlier file still has `since`, and otherwise the whole snapshot. Returns None if the
        owner has no rows. Raises FileNotFoundError if the newest file is missing, and DataError if it is damaged.
        """
        with open_owners(self.owners(latest.snapshot)) as owners:
            newest = owners.file(key)
        if newest is None:
            return None
        if since == newest.digest:
            return newest.digest, b""
        for digest in latest.earlier if since else ():
            # If the earlier file is missing or damaged, the device gets the whole snapshot.
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
        """Publish a signed snapshot as the newest of its service; return its description.

        `views` are the views in the snapshot. Keeps up to `keep` earlier snapshots, writes a delta from each of them to
        the new one, and deletes all other files. `discloses` (the features that the snapshot exposes) and `tables` (the
        fingerprint of each view's table) go into the description. Hold `locked` during the call. A reader with an older
        description may then find a file missing, and must call `latest` again.
        """
        before = self.latest_or_none()
        earlier = [] if before is None else [before.snapshot, *before.earlier]
        deltas = {}
        for digest in earlier[:keep]:
            # If an earlier snapshot is missing, damaged, or from an earlier contract, devices get the whole snapshot.
            with suppress(DataError, FileNotFoundError):
                deltas[digest] = difference(read_snapshot(self.snapshot(digest), views), fresh)
        write_atomically(self.path(fresh.digest), fresh.data)
        for digest, delta in deltas.items():
            write_atomically(self.folder / _delta(digest, fresh.digest), delta)
        header = fresh.header
        latest = Latest(fresh.digest, header.number, header.made, tuple(deltas), tuple(discloses), dict(tables or {}))
        files = {self.path(digest) for digest in (fresh.digest, *deltas)}
        return self._lead(latest, files | {self.folder / _delta(digest, fresh.digest) for digest in deltas})

    def add_owners(  # noqa: PLR0913 - all parts of a snapshot
        self,
        generation: SharedSnapshot,
        own: Mapping[bytes, Sequence[Lines]],
        sign: Callable[[bytes], bytes],
        keep: int,
        *,
        discloses: Sequence[str] = (),
        tables: Mapping[str, str] | None = None,
        signed: Callable[[bytes, OwnFile], None] = lambda _key, _file: None,
    ) -> Latest:
        """Publish a new file with the snapshots of all owners (such as users) as the newest; return its description.

        `generation` is the part that all owners share. `own` maps each owner's encoded key to the owner's rows, in
        ascending order of keys. `sign` returns the signature for the bytes of a snapshot. `signed` is called with each
        owner's encoded key and signed snapshot before the file is in place. Keeps up to `keep` earlier files and
        deletes the others. `discloses` (the features that the snapshots expose) and `tables` (the fingerprint of each
        view's table) go into the description. Hold `locked` during the call.
        """
        before = self.latest_or_none()
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
            # Do not leave the partial file on a full disk.
            partial.unlink(missing_ok=True)
            raise
        header = generation.header
        latest = Latest(
            digest, header.number, header.made, tuple(kept), tuple(discloses), dict(tables or {}), generation.owner
        )
        return self._lead(latest, {self.owners(each) for each in (digest, *kept)})

    def _lead(self, latest: Latest, files: set[Path]) -> Latest:
        write_atomically(self.folder / LATEST, msgspec.json.encode(latest))
        for file in self._files() - files:
            file.unlink(missing_ok=True)
        return latest

    def clear(self) -> None:
        """Delete all snapshots of a service, so that servers stop offering them. Hold `locked` during the call.

        Keeps the lock file, because other processes may wait for it.
        """
        (self.folder / LATEST).unlink(missing_ok=True)
        for file in self._files():
            file.unlink(missing_ok=True)

    def _files(self) -> set[Path]:
        return {file for form in ("*.snapshot", "*.diff", "*.owners", ".*.partial") for file in self.folder.glob(form)}


@lru_cache(256)
def _sha256(path: Path, *_state: int) -> str:
    # Hashing megabytes takes longer than sending them, so cache it. Only root can change a file without changing its
    # ctime.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _delta(digest: str, newest: str) -> str:
    return f"{digest}.{newest[:16]}.diff"
