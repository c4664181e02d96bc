"""Faults of a disk or a machine, once for each file of that name in the folder `TEST_FAULTS`: Python imports this."""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from isthmus.features.contract.schema import ViewContract
from isthmus.features.online.store import OnlineStore, WriteCounts
from isthmus.features.publishing import changes

_FOLDER = Path(os.environ["TEST_FAULTS"])
_written: list[int] = []
_write, _send = pq.ParquetWriter.write_table, changes.write_rows


def _once(fault: str) -> bool:
    try:
        (_FOLDER / fault).rename(_FOLDER / f"{fault}.done")
    except FileNotFoundError:
        return False
    return True


def _fail(kind: str = "") -> None:
    if _once(f"slow{kind}"):
        time.sleep(60)
    if _once(f"kill{kind}"):
        # The executor's JVM started the daemon that started this worker.
        daemon = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(daemon[1]), signal.SIGKILL)
        time.sleep(60)


def _write_table(self: Any, *arguments: Any, **options: Any) -> None:
    if (_FOLDER / "full").exists():
        raise OSError(errno.ENOSPC, "No space left on device")
    _write(self, *arguments, **options)
    _written.append(1)
    if len(_written) >= 4:
        _fail()


def _write_rows(store: OnlineStore, view: ViewContract, rows: Any, until: int | None) -> WriteCounts:
    counts = _send(store, view, rows, until)
    _fail("-online")
    return counts


pq.ParquetWriter.write_table = _write_table
changes.write_rows = _write_rows
