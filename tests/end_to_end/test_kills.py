"""Every verb killed at any moment, then run again: the result of an undisturbed run, and nothing left over."""

import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from isthmus.features.offline.store import OfflineStore
from isthmus.features.redis.connection import connect
from isthmus.orchestration.project import Project
from tests import processes
from tests.orchestration import shop

pytestmark = pytest.mark.accept

KILLS = int(os.environ.get("TEST_KILLS", "1"))
ISTHMUS = str(Path(sys.executable).with_name("isthmus"))


def _tables(project: Project) -> dict[str, Any]:
    """The offline tables, to the bit."""
    store, found = OfflineStore(project.offline), {}
    for name, view in project.applied().views.items():
        history = store.history(view)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, history.table().schema) as stream:
            stream.write_table(history.table().combine_chunks())
        found[name] = history.fingerprint, sink.getvalue().to_pybytes()
    return found


def _online(project: Project) -> dict[bytes, Any]:
    """The rows in Redis; what was published from which table has times of the run in it."""
    with project.redis() as url, connect(url) as client:
        keys = [key for key in client.keys("*") if not key.endswith(b":tables")]
        samples = {key for key in keys if key.endswith(b"|sample")}
        return {key: client.get(key) if key in samples else client.hgetall(key) for key in keys}


def _files(*places: str, without: tuple[str, ...] = ()) -> Callable[[Project], dict[str, str]]:
    """The files of folders of the state, to the bit, but for those that have times or latencies in them."""

    def found(project: Project) -> dict[str, str]:
        files = {f"{place}/{name}": value for place in places
                 for name, value in shop.files(project.state / place).items()}  # fmt: skip
        return {name: value for name, value in files.items() if not name.endswith(without)}

    return found


def _deployed(project: Project) -> Any:
    """What is in force, and the bytes of the cache."""
    deployment = json.loads(project.deployment_file.read_bytes())
    return {**deployment, "deployed_at": 0}, _files("deployments")(project)


RESULTS: dict[str, Callable[[Project], Any]] = {
    "build": _tables,
    "materialize": _online,
    "features training-set": _files("training", without=("_record.json",)),
    "distill": _files("models", without=(".md", ".html", "report.json")),
    "model export": _files("packages"),
    "deploy": _deployed,
}
"""What each verb leaves; in the order in which a user runs them."""


class Undisturbed(NamedTuple):
    """A verb that nothing kills."""

    before: Path
    """The project just before it."""
    seconds: float
    result: Any


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    """Every verb, all of them run in the one folder where they are killed."""
    root = tmp_path_factory.mktemp("kills") / "shop"
    shop.learnable(shop.write(root))
    runs = {}
    _run(root, "apply")
    for verb, result in RESULTS.items():
        if verb == "deploy":
            _run(root, "verify", "--all")
        before = Path(shutil.copytree(root, root.with_name(verb)))
        began = time.monotonic()
        _run(root, *verb.split())
        runs[verb] = Undisturbed(before, time.monotonic() - began, result(Project(root)))
    return runs


@pytest.mark.timeout(900)
@pytest.mark.parametrize("verb", RESULTS)
def test_a_killed_verb_is_run_again_and_leaves_nothing(undisturbed: dict[str, Undisturbed], verb: str) -> None:
    before, seconds, expected = undisturbed[verb]
    root, result, chance = before.with_name("shop"), RESULTS[verb], random.Random(verb)

    def restore() -> Project:
        shutil.rmtree(root)
        shutil.copytree(before, root)
        return Project(root)

    killed = 0
    try:
        for _ in range(20 * KILLS):
            project = restore()
            process = subprocess.Popen(
                [ISTHMUS, *verb.split()], cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            time.sleep(chance.uniform(0.1, 1) * seconds)
            process.kill()
            killed += process.wait() < 0
            assert not processes.orphans(root, 30)
            _run(root, *verb.split())
            assert not processes.orphans(root, 30)
            assert result(project) == expected
            _require_free(project.state)
            if killed == KILLS:
                return
        pytest.fail(f"{killed} of {20 * KILLS} kills met a running {verb}")
    finally:
        processes.end(root)


def _require_free(state: Path) -> None:
    for file in state.rglob("*.lock"):
        with file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _run(root: Path, *arguments: str) -> None:
    done = subprocess.run([ISTHMUS, *arguments], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
