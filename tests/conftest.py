"""Hypothesis profiles: `HYPOTHESIS_PROFILE=thorough pytest` looks harder."""

import gc
import os
import shutil
import signal
import sys
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import jvm

# What modules consist of is no garbage: half of the time of importing them would go into looking for it.
gc.disable()

# The environments that tests install import few of their modules, and compiling all takes longer than the installation.
os.environ["PIP_COMPILE"] = "0"
os.environ["SPARK_SUBMIT_OPTS"] = " ".join(filter(None, (os.environ.get("SPARK_SUBMIT_OPTS"), jvm.options())))

settings.register_profile("default", max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


PREREQUISITES = ("git", "java", "make", "node", "npm")
"""The programs that the README names for `make test`."""
SYSTEM = (
    "awk basename bash cat chmod cp cut date dirname echo env expr false find grep head hostname id kill ldconfig ldd "
    "ln ls mkdir mktemp mv nice nohup ps pwd readlink realpath rm sed sh sha256sum sleep sort stat tail tar tee test "
    "touch tr true uname uniq wc which xargs"
)
"""The programs that every Linux machine has."""


def pytest_configure(config: pytest.Config) -> None:
    """Let SIGINT end child processes, and hide programs that only `make accept` may need.

    Shells ignore SIGINT for background jobs, and children inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr == "not accept":
        folder = Path(tempfile.mkdtemp(prefix="programs-"))
        for name in (*PREREQUISITES, *SYSTEM.split()):
            if found := shutil.which(name):
                (folder / name).symlink_to(found)
        os.environ["PATH"] = str(folder)
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Let `make accept` import only the files that have a test for it: each of three workers imports them all."""
    without = config.option.markexpr == "accept and not slowest" and collection_path.name.startswith("test_")
    return True if without and b"accept" not in collection_path.read_bytes() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, short files last; between them, files that wait among files that compute.

    A file stays in one worker, so a long one at the end would leave the other workers without work.
    """
    long, short = {"transforms", "rollout", "verification", "graph", "end_to_end"}, {"features", "package"}
    longest = {
        "test_kills.py", "test_graph.py", "test_packaging.py", "test_docs.py", "test_portable.py", "test_executorch.py",
    }  # fmt: skip

    def turn(item: pytest.Item) -> tuple[bool, bool, bool, int]:
        file = item.nodeid.partition("::")[0]
        parts = set(file.split("/"))
        return longest.isdisjoint(parts), long.isdisjoint(parts), not short.isdisjoint(parts), zlib.crc32(file.encode())

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """Looks for garbage from here on, and never among what was imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print the name of a failed test at once: a run that is stopped, as one in CI is, has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        sys.stdout.write(f"\nFAILED {report.nodeid} ({report.when}): {crash or report.longrepr}"[:1000] + "\n")
        sys.stdout.flush()


def pytest_runtest_setup() -> None:
    """Forget the width of a terminal: workers have none, but readline exports one to their environment."""
    os.environ.pop("COLUMNS", None)
