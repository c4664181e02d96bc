"""The clients for Android and iOS, compiled: held to the cases of all readers, to a running server, and killed."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from random import Random
from threading import Event, Thread

import pytest

from isthmus.package.clients import FOLDER
from tests.end_to_end.compilers import Command, kotlin, swift
from tests.end_to_end.test_snapshots import Site, open_site
from tests.package.snapshot import vectors
from tests.package.snapshot.support import Content
from tests.package.snapshot.vectors import CHANGED, HOUR, MADE, SECOND, snapshot

pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

CASES = Path(vectors.__file__).parent
LARGE: Sequence[Content] = [
    {(f"c{n}",): (MADE, MADE, {"n": n, "text": text}) for n in range(1000)} for text in ("wet", "dry")
]
"""Rows that take a while to be written: 40 kB."""


@pytest.fixture(scope="module", params=[kotlin, swift])
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Command:
    made: Command = request.param(tmp_path_factory.mktemp("client"), FOLDER / "Snapshots", CASES)
    return [*made, str(vectors.FILE)]


def test_it_answers_in_all_cases_as_the_other_readers(command: Command) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    steps = sum(len(case["steps"]) + 1 for case in vectors.vectors()["cases"])
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{steps} passed, 0 failed"), (
        done.stdout + done.stderr
    )


class Phone:
    """A process that does what it is asked to, line by line; `begin` is what it has when it is opened."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.begin = self._answer()

    def __call__(self, words: str) -> str:
        self.say(words)
        return self._answer()

    def say(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def _phone(command: Command, site: Site, folder: Path, now: int, *owner: str) -> Iterator[Phone]:
    arguments = [*command, f"{site.url}snapshots/late", str(folder), str(now), *owner]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Phone(process)
        finally:
            process.kill()


def test_it_fetches_goes_on_by_differences_and_goes_offline(command: Command, tmp_path: Path, redis_url: str) -> None:
    folder, fetched = tmp_path / "phone", list[int]()

    def counted(body: bytes) -> bytes:
        fetched.append(len(body))
        return body

    with open_site(tmp_path, redis_url) as site:
        site.views, site.harm = vectors.VIEWS, counted
        with _phone(command, site, folder, MADE + SECOND) as phone:
            assert phone.begin == "digest null null"
            assert phone("require") == "none"
            assert phone("update") == "refused"
            first = site.offer(snapshot())
            assert [phone("update"), phone("update"), phone("digest")] == ["true", "false", first.digest]
            assert [phone("row c7"), phone("row zz"), phone("require")] == [
                "present 7 wet",
                "not_found null null",
                "fit",
            ]
            assert fetched[-2:] == [len(first.data), 0]
            second = site.offer(snapshot(CHANGED, number=2))
            assert [phone("update"), phone("row c7"), phone("digest")] == ["true", "present -1 null", second.digest]
            assert fetched[-1] < len(second.data) / 2
            # A difference that is harmed is made up for by the whole file; a whole file is not.
            third = site.offer(snapshot(number=3))
            site.harm = lambda body: body[:-1] if body[:8] == b"isthdiff" else body
            assert [phone("update"), phone("digest")] == ["true", third.digest]
            site.offer(snapshot(CHANGED, number=4))
            site.harm = lambda body: body[:-1]
            assert [phone("update"), phone("digest"), phone("row c2")] == ["signature", third.digest, "present 2 wet"]
            site.harm = bytes
            # Where nothing can be stored it goes on with what it has.
            shutil.rmtree(folder)
            folder.write_text("no folder")
            assert [phone("update"), phone("digest"), phone("row c2")] == ["store", third.digest, "present 2 wet"]
            folder.unlink()
            assert phone("at_once") == site.shelf.latest().snapshot  # type: ignore[union-attr]
    with _phone(command, site, folder, MADE + HOUR) as phone:
        assert phone.begin == f"digest {snapshot(CHANGED, number=4).digest} null"
        assert [phone("update"), phone("row c7"), phone("require")] == ["offline", "present -1 null", "fit"]
    with _phone(command, site, folder, MADE + HOUR + 1) as phone:
        assert phone("require") == "age"
    (file,) = (file for file in folder.iterdir() if not file.name.endswith("-lock"))
    file.write_bytes(file.read_bytes()[:-1])
    with _phone(command, site, folder, MADE) as phone:
        assert phone.begin == "digest null signature"


def test_it_has_the_rows_of_its_owner_alone(command: Command, tmp_path: Path, redis_url: str) -> None:
    folder, fetched = tmp_path / "phone", list[bytes]()

    def noted(body: bytes) -> bytes:
        fetched.append(body[:8])
        return body

    with open_site(tmp_path, redis_url) as site:
        site.views, site.harm = vectors.VIEWS, noted
        site.offer_owners(snapshot(), vectors.SEALER)
        with _phone(command, site, folder, MADE + SECOND, "c7") as phone:
            assert [phone("update"), phone("row c7"), phone("row c2")] == ["true", "present 7 wet", "owner"]
            site.offer_owners(snapshot(CHANGED, number=2), vectors.SEALER)
            assert [phone("update"), phone("row c7"), phone("require")] == ["true", "present -1 null", "fit"]
            assert fetched[-1] == b"isthdiff"
            site.offer_owners(snapshot(number=3), vectors.SEALER)
            other = site.own("c2")
            site.harm = lambda _: other
            assert [phone("update"), phone("row c7")] == ["owner", "present -1 null"]
            site.harm = bytes
        # After the user changes, nothing of the one before is used, nor lost.
        with _phone(command, site, folder, MADE + SECOND, "c2") as phone:
            assert phone.begin == "digest null null"
            assert [phone("update"), phone("row c2"), phone("row c7")] == ["true", "present 2 wet", "owner"]
        with _phone(command, site, folder, MADE + SECOND, "ü") as phone:
            assert [phone("update"), phone("row ü")] == ["true", "expired null null"]
        with _phone(command, site, folder, MADE + SECOND, "a/b %") as phone:
            assert phone("update") == "refused"
    with _phone(command, site, folder, MADE + SECOND, "c7") as phone:
        assert not phone.begin.startswith("digest null")
        assert [phone("update"), phone("row c7")] == ["offline", "present -1 null"]


@pytest.mark.slowest
def test_killed_at_any_moment_of_an_update_it_has_the_old_or_the_new(
    command: Command, tmp_path: Path, redis_url: str
) -> None:
    random, numbers, folder = Random(3), [0], tmp_path / "phone"
    with open_site(tmp_path, redis_url) as site:
        site.views = vectors.VIEWS
        known: dict[str, int] = {"null": 0}
        done = Event()

        def offer(number: int) -> None:
            file = snapshot(LARGE[number % 2], number=number)
            known[file.digest] = number
            site.offer(file, keep=1)

        def forever() -> None:
            for number in takewhile(lambda _: not done.is_set(), count(2)):
                offer(number)

        offer(1)
        offering = Thread(target=forever)
        offering.start()
        try:
            for _ in range(25):
                with _phone(command, site, folder, MADE) as phone:
                    _, digest, problem = phone.begin.split()
                    assert problem == "null"
                    numbers.append(known[digest])
                    while (answer := phone("update")) == "false":
                        pass
                    assert answer == "true"
                    phone.say("forever")
                    time.sleep(random.uniform(0, 0.2))
                    phone.process.send_signal(signal.SIGKILL)
        finally:
            done.set()
            offering.join()
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 25
