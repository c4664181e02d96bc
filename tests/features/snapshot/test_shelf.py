"""The folder of a service's snapshots, while they are added, read, and killed in between."""

import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from isthmus.features.errors import DataError
from isthmus.features.snapshot.delta import applied
from isthmus.features.snapshot.file import read_snapshot
from isthmus.features.snapshot.seal import require_sealed
from isthmus.features.snapshot.shelf import LATEST, Shelf
from tests.features.snapshot.support import made, sealer
from tests.features.snapshot.test_file import ROWS, VIEWS


def _add(shelf: Shelf, number: int, keep: int = 3) -> bytes:
    file = made(VIEWS, [{(number,): (number, number, {"n": number, "x": 1.0}), **ROWS[0]}, ROWS[1]], number)
    with shelf.locked():
        shelf.add(file, VIEWS, keep)
    return file.data


def _whole(shelf: Shelf) -> int:
    """The number of the newest snapshot; every file that the folder promises is there and leads to it."""
    latest = shelf.latest()
    if latest is None:
        return 0
    newest = shelf.snapshot(latest.snapshot)
    file = read_snapshot(newest, VIEWS)
    require_sealed(file, sealer().public_key)
    assert (file.digest, file.header.number) == (latest.snapshot, latest.number)
    for digest in latest.earlier:
        assert applied(shelf.snapshot(digest), shelf.delta(digest, latest)) == newest
    return latest.number


def test_the_last_ones_lead_to_the_newest_and_older_ones_go(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "service")
    assert shelf.latest() is None
    files = [_add(shelf, number) for number in range(1, 7)]
    latest = shelf.latest()
    assert latest is not None
    assert _whole(shelf) == 6
    assert [shelf.snapshot(digest) for digest in latest.earlier] == files[-2:1:-1]
    assert len([*shelf.folder.glob("*.snapshot")]) == 4
    assert len([*shelf.folder.glob("*.diff")]) == 3


def test_what_a_killed_process_has_left_goes_with_the_next_one(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    _add(shelf, 1)
    part = tmp_path / f".{'0' * 64}.snapshot.123.partial"
    part.write_bytes(b"half")
    _add(shelf, 2)
    assert not part.exists()
    assert _whole(shelf) == 2


def test_without_differences_only_the_newest_stays(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for number in (1, 2):
        _add(shelf, number, keep=0)
    assert sorted(path.suffix for path in shelf.folder.iterdir() if path.suffix) == [".snapshot"]
    assert _whole(shelf) == 2


def test_an_earlier_one_that_is_damaged_leads_nowhere(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
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
    shelf = Shelf(tmp_path)
    _add(shelf, 1)
    (tmp_path / LATEST).write_bytes(damaged)
    with pytest.raises(DataError, match="cannot be read"):
        shelf.latest()


@pytest.mark.accept
def test_killed_at_any_moment_the_newest_is_whole(tmp_path: Path) -> None:
    random, shelf = Random(0), Shelf(tmp_path / "service")
    numbers = []
    sealer()  # its key is the other processes', too
    for _ in range(50):
        command = [sys.executable, "-m", __name__, str(shelf.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            time.sleep(random.uniform(0, 0.05))
            process.kill()
        numbers.append(_whole(shelf))
    # Each process had added one before it was killed.
    assert numbers == sorted(set(numbers))


if __name__ == "__main__":
    shelf = Shelf(Path(sys.argv[1]))
    known = shelf.latest()
    number = known.number if known else 0
    while True:
        number += 1
        _add(shelf, number)
        sys.stdout.write(".")
        sys.stdout.flush()
