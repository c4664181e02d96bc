"""A file that is replaced while it is watched."""

import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.serving.watchedfile import WatchedFile

WRITER = "import os, sys\nfor n in range(5000):\n    open('next', 'w').write('x' * n)\n    os.replace('next', 'file')\n"


def test_a_file_that_is_replaced_while_it_is_read_is_read_once(tmp_path: Path) -> None:
    """Read twice, a deployment would begin its trial anew."""
    seen: list[bytes] = []
    watched = WatchedFile(tmp_path / "file", lambda text, _: seen.append(text))
    with subprocess.Popen([sys.executable, "-c", WRITER], cwd=tmp_path) as writer:
        while writer.poll() is None or watched.changed():
            if watched.changed():
                watched.load()
    assert len(seen) == len(set(seen)) > 10
    assert len(seen[-1]) == 4999


@pytest.mark.parametrize("error", [ValueError("bad"), RecursionError("deep"), OverflowError("large")], ids=repr)
def test_a_file_that_no_parser_can_read_leaves_what_was_there(tmp_path: Path, error: Exception) -> None:
    def parse(text: bytes, _where: str) -> bytes:
        if text == b"bad":
            raise error
        return text

    watched = WatchedFile(tmp_path / "file", parse)
    for text in (b"good", b"bad"):
        (tmp_path / "file").write_bytes(text)
        watched.load()
    assert watched.content == b"good"
    assert type(error).__name__ in str(watched.problem)
