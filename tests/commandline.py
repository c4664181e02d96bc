"""The command line in the process of a test: what starting Python and its libraries takes would be most of it."""

import contextlib
import io
import os
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from isthmus.orchestration.cli import cli


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> "CompletedProcess[str]":
    """What `isthmus` with these arguments returns and writes, run in the folder `cwd`."""
    command = [str(argument) for argument in arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(contextlib.chdir(cwd or Path.cwd()))
        stack.enter_context(mock.patch.dict(os.environ, environment))
        try:
            code = cli.run(command)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    return CompletedProcess(command, code, out.getvalue(), err.getvalue())
