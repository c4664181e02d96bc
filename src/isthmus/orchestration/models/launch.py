"""`isthmus distill --processes N`: N processes on this machine, started and watched by torch's launcher."""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGTERM, Signals
from tempfile import TemporaryDirectory
from typing import Any

from isthmus.features import errors
from isthmus.features.errors import (
    ConfigurationError,
    DependencyError,
    IsthmusError,
    LostProcessError,
    Problem,
    RequestError,
    Stopped,
    extra,
)
from isthmus.features.files import write_atomically

ERRORS = "_ISTHMUS_ERRORS"
"""Variable with the folder for the errors of launched processes. Names that begin with ISTHMUS are settings."""
_END_SECONDS = 60
"""Time to write a last checkpoint before the launcher kills a process."""
_RESUME = "the same command goes on from the last checkpoint"


def write_error(folder: Path, error: IsthmusError) -> None:
    content = {**error.as_dict(), "code": error.exit_code, "time": time.time()}
    write_atomically(folder / f"{os.environ['RANK']}.json", json.dumps(content).encode())


def end_with_launcher() -> None:
    """End this process when the process that launched it ends, even if that one was killed."""
    if ERRORS in os.environ and sys.platform == "linux":
        from isthmus.serving.process import end_with_parent

        end_with_parent(os.getppid())


def launch(root: Path, arguments: Sequence[str], processes: int, *, side_by_side: bool = False) -> None:
    """Run an `isthmus` command on the project at `root` in several processes. Only the first one's output shows.

    They train each model together, or, with `side_by_side`, each its share of the models alone.

    Raise the error of the process that failed first. Raise Stopped on a signal, after all processes have stopped, and a
    DependencyError if a process was killed.
    """
    if (launched := os.environ.get("WORLD_SIZE", "1")) not in ("", "1"):
        raise RequestError(
            "command line", f"asks for {processes} processes in one of {launched}",
            remedy="leave the option out under a launcher",
        )  # fmt: skip
    with extra("distill"):
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from isthmus.distill.accelerator import SIDE_BY_SIDE, cores
    logging.disable(logging.CRITICAL)  # the launcher reports each signal and each failure, and so do we
    with TemporaryDirectory(prefix="isthmus-") as folder:
        os.environ[ERRORS] = folder
        if side_by_side:
            os.environ[SIDE_BY_SIDE] = "1"
        else:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        config = LaunchConfig(
            1, 1, processes, run_id="isthmus", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1", max_restarts=0, shutdown_timeout=_END_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=dict.fromkeys(range(1, processes), Std.ALL)),
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)("-m", "isthmus", *arguments, "--project", str(root))
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise _cause(Path(folder), codes, processes) from error
        except SignalException as error:
            name = Signals(error.sigval).name
            raise Stopped("isthmus distill", f"stopped by {name}", int(error.sigval), remedy=_RESUME) from error
        finally:
            del os.environ[ERRORS]
            os.environ.pop(SIDE_BY_SIDE, None)


def _cause(folder: Path, codes: Mapping[int, int], processes: int) -> IsthmusError:
    """Return the error that ended the others: a real one, else a killed process, else a stop or a lost connection."""
    files = sorted(folder.glob("[0-9]*.json"), key=lambda file: int(file.stem))
    found = sorted((json.loads(file.read_bytes()) for file in files), key=lambda error: float(error["time"]))
    raised = [*map(_restored, found)]
    own = [error for error in raised if not isinstance(error, LostProcessError | Stopped)]
    if own:
        return own[0]
    # The launcher ends the others by SIGTERM.
    silent = {rank: code for rank, code in codes.items() if not (folder / f"{rank}.json").exists()}
    if killed := {rank: code for rank, code in silent.items() if code != -SIGTERM}:
        rank, code = next(iter(killed.items()))
        how = f"was ended by {Signals(-code).name}" if code < 0 else f"exited with code {code}"
        logs = [*folder.glob(f"**/{rank}/stderr.log")]
        said = logs[0].read_text(errors="replace").strip()[-2000:] if logs else ""
        return DependencyError(
            f"rank {rank} of {processes}", f"{how}{':' * bool(said)} {said}".strip(),
            remedy=f"check the memory of this machine; {_RESUME}" if code == -9 else _RESUME,
        )  # fmt: skip
    return (raised or [LostProcessError("isthmus distill", "all processes were ended by SIGTERM", remedy=_RESUME)])[0]


def _restored(content: Mapping[str, Any]) -> IsthmusError:
    where, found, expected, remedy = (str(content[name]) for name in ("where", "found", "expected", "remedy"))
    if "problems" in content:
        return ConfigurationError(where, [Problem(**problem) for problem in content["problems"]], remedy=remedy)
    kind = getattr(errors, content["error"], IsthmusError)
    if kind is Stopped:
        return Stopped(where, found, int(content["code"]) - 128, remedy=remedy)
    error: IsthmusError = kind(where, found, expected=expected, remedy=remedy)
    error.exit_code = int(content["code"])
    return error
