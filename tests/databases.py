"""A PostgreSQL server of the tests' own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PASSWORD = "p@ss%word/of:the?database"  # noqa: S105 - of a server that lives as long as a test
"""What an address must write otherwise."""


_PATIENCE = 30.0


def _binaries() -> Path | None:
    known = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = shutil.which("initdb") or (str(known[-1]) if known else None)
    return None if found is None else Path(found).resolve().parent


@contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """The address, without user and password, of a server whose user `shop` has the `PASSWORD`."""
    binaries = _binaries()
    if binaries is None:
        assert not os.environ.get("CI"), "PostgreSQL is missing: install the package postgresql"
        pytest.skip("PostgreSQL is not installed: no initdb")
    # It refuses to be root's.
    user = "postgres" if os.geteuid() == 0 else None
    folder.mkdir(mode=0o755)
    if user:
        shutil.chown(folder, user)
        for parent in folder.parents:
            if parent.is_relative_to("/tmp") and parent != Path("/tmp"):  # noqa: S108 - pytest's own folders
                parent.chmod(0o755)
    secret = folder / "secret"
    secret.write_text(PASSWORD)
    data, port = folder / "data", _free_port()
    common = {"user": user, "cwd": folder, "check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(
        [binaries / "initdb", "-D", data, "-U", "shop", "-A", "scram-sha-256", f"--pwfile={secret}", "-N"],
        **common,  # type: ignore[call-overload]
    )
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    start = [binaries / "pg_ctl", "-D", data, "-o", options, "-l", folder / "log", "-w", "start"]
    subprocess.run(start, **common)  # type: ignore[call-overload]
    try:
        yield f"127.0.0.1:{port}/postgres"
    finally:
        # Not as its user: another session of pytest may have closed the folder to all but root.
        process = int((data / "postmaster.pid").read_text().split()[0])
        os.kill(process, signal.SIGQUIT)
        end = time.monotonic() + _PATIENCE
        while Path(f"/proc/{process}").exists() and time.monotonic() < end:
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
