"""The folder of a service's snapshots, while they are added, read, and killed in between."""

import multiprocessing
import signal
import time
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest

from isthmus.features.contract.schema import Column
from isthmus.features.errors import DataError
from isthmus.features.types import Int64
from isthmus.package.snapshot.delta import apply_delta
from isthmus.package.snapshot.file import read_snapshot
from isthmus.package.snapshot.owners import encode_owner, open_owners
from isthmus.package.snapshot.signature import require_sealed, signature_checker
from isthmus.package.snapshot.store import LATEST, Latest, SnapshotFolder
from tests.package.snapshot.support import made, put_owners, sealer
from tests.package.snapshot.test_file import ROWS, VIEWS


def _add(shelf: SnapshotFolder, number: int, keep: int = 3) -> bytes:
    file = made(VIEWS, [{(number,): (number, number, {"n": number, "x": 1.0}), **ROWS[0]}, ROWS[1]], number)
    with shelf.locked():
        shelf.add(file, VIEWS, keep)
    return file.data


OWNER = Column("k", Int64)


def _add_owners(shelf: SnapshotFolder, number: int, keep: int = 3) -> Latest:
    rows = {(n,): (number, number, {"n": n + number, "x": 1.0}) for n in range(20)}
    return put_owners(shelf, VIEWS, [rows, ROWS[1]], OWNER, number, keep)


def _whole(shelf: SnapshotFolder) -> int:
    """The number of the newest snapshot; every file that the folder promises is there and leads to it."""
    latest = shelf.latest()
    if latest is None:
        return 0
    if latest.owner is not None:
        signed = signature_checker(sealer().public_key)
        for digest in (latest.snapshot, *latest.earlier):
            with open_owners(shelf.owners(digest)) as owners:
                assert len(owners) == 20
                assert all(signed(file.data) for _, _, file in owners)
                numbers = owners.generation.header.number
            assert (numbers == latest.number) == (digest == latest.snapshot)
        return latest.number
    newest = shelf.snapshot(latest.snapshot)
    file = read_snapshot(newest, VIEWS)
    require_sealed(file, sealer().public_key)
    assert (file.digest, file.header.number) == (latest.snapshot, latest.number)
    for digest in latest.earlier:
        assert apply_delta(shelf.snapshot(digest), shelf.delta(digest, latest)) == newest
    return latest.number


def test_the_last_ones_lead_to_the_newest_and_older_ones_go(tmp_path: Path) -> None:
    shelf = SnapshotFolder(tmp_path / "service")
    assert shelf.latest() is None
    files = [_add(shelf, number) for number in range(1, 7)]
    latest = shelf.latest()
    assert latest is not None
    assert _whole(shelf) == 6
    assert [shelf.snapshot(digest) for digest in latest.earlier] == files[-2:1:-1]
    assert len([*shelf.folder.glob("*.snapshot")]) == 4
    assert len([*shelf.folder.glob("*.diff")]) == 3


def test_what_a_killed_process_has_left_goes_with_the_next_one(tmp_path: Path) -> None:
    shelf = SnapshotFolder(tmp_path)
    _add(shelf, 1)
    part = tmp_path / f".{'0' * 64}.snapshot.123.partial"
    part.write_bytes(b"half")
    _add(shelf, 2)
    assert not part.exists()
    assert _whole(shelf) == 2


def test_without_differences_only_the_newest_stays(tmp_path: Path) -> None:
    shelf = SnapshotFolder(tmp_path)
    for number in (1, 2):
        _add(shelf, number, keep=0)
    assert sorted(path.suffix for path in shelf.folder.iterdir() if path.suffix) == [".snapshot"]
    assert _whole(shelf) == 2


def test_an_earlier_one_that_is_damaged_leads_nowhere(tmp_path: Path) -> None:
    shelf = SnapshotFolder(tmp_path)
    _add(shelf, 1)
    before = shelf.latest()
    assert before is not None
    shelf.path(before.snapshot).write_bytes(b"torn")
    _add(shelf, 2)
    after = shelf.latest()
    assert after is not None
    assert after.earlier == ()
    assert _whole(shelf) == 2


@pytest.mark.parametrize("damaged", [b"{}", b'{"snapshot": "\xff"}'])
def test_a_damaged_pointer_is_named(tmp_path: Path, damaged: bytes) -> None:
    shelf = SnapshotFolder(tmp_path)
    _add(shelf, 1)
    (tmp_path / LATEST).write_bytes(damaged)
    with pytest.raises(DataError, match="cannot be read"):
        shelf.latest()


def test_an_owner_of_no_type_is_a_damaged_pointer(tmp_path: Path) -> None:
    shelf = SnapshotFolder(tmp_path)
    _add_owners(shelf, 1)
    whole = (tmp_path / LATEST).read_bytes()
    for other in (b"Int65", b"Float64", b"Int64\\n", b""):
        (tmp_path / LATEST).write_bytes(whole.replace(b'"Int64"', b'"%s"' % other))
        with pytest.raises(DataError, match="cannot be read"):
            shelf.latest()


def test_an_owner_goes_on_by_differences(tmp_path: Path) -> None:
    shelf, key = SnapshotFolder(tmp_path), encode_owner(7, OWNER)
    had = [shelf.owner_snapshot(key, _add_owners(shelf, number)) for number in range(1, 7)]
    latest = shelf.latest()
    assert latest is not None
    assert (_whole(shelf), len(latest.earlier), latest.owner) == (6, 3, ("k", "Int64"))
    assert len([*tmp_path.glob("*.owners")]) == 4
    *earlier, newest = [file for file in had if file is not None]
    assert len(earlier) == 5
    for place, (digest, data) in enumerate(earlier):
        found = shelf.owner_snapshot(key, latest, digest)
        assert found is not None
        assert found[0] == newest[0]
        # Of the three before it there is a difference; who has an older one gets the whole file.
        assert (found[1] == newest[1]) == (place < 2)
        assert place < 2 or apply_delta(data, found[1]) == newest[1]
    assert shelf.owner_snapshot(key, latest, newest[0]) == (newest[0], b"")
    # The file of another owner is no file of this one.
    other = shelf.owner_snapshot(encode_owner(8, OWNER), latest)
    assert other is not None
    assert shelf.owner_snapshot(key, latest, other[0]) == newest
    assert shelf.owner_snapshot(encode_owner(20, OWNER), latest) is None
    shelf.owners(latest.earlier[0]).write_bytes(b"torn")
    assert shelf.owner_snapshot(key, latest, earlier[-1][0]) == newest
    shelf.owners(latest.snapshot).unlink()
    with pytest.raises(FileNotFoundError):
        shelf.owner_snapshot(key, latest)


def test_with_an_owner_and_without_one_it_begins_anew(tmp_path: Path) -> None:
    shelf = SnapshotFolder(tmp_path)
    for number, add in enumerate((_add, _add_owners, _add_owners, _add, _add), 1):
        add(shelf, number)
        assert _whole(shelf) == number
        latest = shelf.latest()
        assert latest is not None
        assert len(latest.earlier) == (number in (3, 5))
        assert len([*tmp_path.glob("*.owners")]) == (1 + len(latest.earlier) if number in (2, 3) else 0)
        assert len([*tmp_path.glob("*.snapshot")]) == (0 if number in (2, 3) else 1 + len(latest.earlier))


def test_a_signature_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    shelf = SnapshotFolder(tmp_path)
    _add_owners(shelf, 1)
    files = {path.name for path in tmp_path.iterdir()}

    def sign(_: bytes) -> bytes:
        raise OSError("the disk is full")

    with open_owners(next(tmp_path.glob("*.owners"))) as owners, pytest.raises(OSError, match="the disk is full"):
        shelf.add_owners(owners.generation, {key: rows for key, rows, _ in owners}, sign, 3)
    assert {path.name for path in tmp_path.iterdir()} == files
    assert _whole(shelf) == 1


@pytest.mark.accept
@pytest.mark.parametrize("add", [_add, _add_owners])
def test_killed_at_any_moment_the_newest_is_whole(tmp_path: Path, add: Callable[[SnapshotFolder, int], object]) -> None:
    random, shelf = Random(0), SnapshotFolder(tmp_path / "service")
    numbers = []
    sealer()  # its key is the other processes', too
    processes = multiprocessing.get_context("forkserver")  # so that only its server imports this module
    processes.set_forkserver_preload([__name__])
    for _ in range(50):
        ready, said = processes.Pipe(duplex=False)
        process = processes.Process(target=_add_without_end, args=(shelf.folder, add, said), daemon=True)
        process.start()
        assert ready.poll(60)
        time.sleep(random.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        numbers.append(_whole(shelf))
    # Each process had added one before it was killed.
    assert numbers == sorted(set(numbers))


def _add_without_end(
    folder: Path, add: Callable[[SnapshotFolder, int], object], said: "Connection[None, None]"
) -> None:
    shelf = SnapshotFolder(folder)
    known = shelf.latest()
    for number in count(known.number + 1 if known else 1):
        add(shelf, number)
        said.send(None)
