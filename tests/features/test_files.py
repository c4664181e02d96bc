import errno
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isthmus.features import files
from isthmus.features.files import publish, scratch_folder

_MANY = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from isthmus.features import files
from isthmus.features.files import publish, scratch_folder

for _ in range(150):
    with scratch_folder(Path(sys.argv[1]), "_join") as folder:
        (folder / "rows").write_text("")
        time.sleep(0.0005)
        assert (folder / "rows").exists()
"""

_KILLED = """
import os, signal, sys
from itertools import count
from pathlib import Path
from isthmus.features import files

target = Path(sys.argv[1]) / "target"

def publish():
    files.publish(target, lambda folder: (folder / "rows").write_text("all"))

publish()
for line in count(1):
    if not (child := os.fork()):
        def trace(frame, event, _, left=[line]):
            if frame.f_code.co_filename != files.__file__:
                return None
            left[0] -= event == "line"
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        publish()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert (target / "rows").read_text() == "all", line
    if not status:
        assert line > 20
        break
"""


def test_no_process_removes_the_folder_of_another_that_lives(tmp_path: Path) -> None:
    many = [subprocess.Popen([sys.executable, "-c", _MANY, str(tmp_path)]) for _ in range(6)]
    assert [process.wait() for process in many] == [0] * 6
    assert not list(tmp_path.iterdir())


def test_what_another_machine_left_stays(tmp_path: Path) -> None:
    own = f"_join-{socket.gethostname()}"
    for name in (f"{own}-0123456789abcdef", f"{own}-2-0123456789abcdef", "_join-elsewhere-0123456789abcdef"):
        (tmp_path / name).mkdir()
    with scratch_folder(tmp_path, "_join"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{own}-2-0123456789abcdef", "_join-elsewhere-0123456789abcdef"
    }  # fmt: skip


def test_a_process_killed_at_any_line_leaves_the_old_or_the_new_folder(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "target"]


@pytest.mark.parametrize("exchange", [True, False])
def test_several_may_publish_to_one_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    """Whichever is the last one is there whole, and nothing beside it."""
    target = tmp_path / "target"
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)

    def often(content: str) -> None:
        def write(folder: Path) -> None:
            for name in ("a", "b"):
                (folder / name).write_text(content)

        for _ in range(60):
            publish(target, write)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(often, "wxyz"))
    assert len({(target / name).read_text() for name in ("a", "b")}) == 1
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_that_of_the_target_and_not_of_what_was_copied(tmp_path: Path) -> None:
    def write(_fresh: Path) -> None:
        # As shutil.copyfile says it.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "read/from", None, "written/to")

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        publish(tmp_path / "target", write)
    assert caught.value.filename == str(tmp_path / "target")
    assert not [*tmp_path.iterdir()]
