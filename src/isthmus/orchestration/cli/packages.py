"""`isthmus package`: what whoever receives a package can ask of it. Needs no project, and no more than a server has."""

import signal
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.features.errors import PackageError
from isthmus.features.package.checksums import REMEDY
from isthmus.orchestration.cli.options import JsonOption
from isthmus.orchestration.cli.screens.terminal import harmless, judge, new_console, new_table

if TYPE_CHECKING:
    from isthmus.distill.export.ladder import Ladder
    from isthmus.features.package.inspect import Inspection, Runtime

verbs = typer.Typer(help="Check a package, wherever it came from.", no_args_is_help=True, rich_markup_mode=None)


MEMORY = 8 << 30
"""Bytes that ONNX Runtime may take to verify a package."""
SECONDS = 600
"""Of CPU time that it may take for that."""


class RuntimeName(StrEnum):
    """What runs the model files."""

    ort = "ort"
    web = "web"
    executorch = "executorch"


@verbs.callback()
def _package() -> None:
    """Check a package, wherever it came from."""


@verbs.command()
def verify(
    path: Annotated[Path, typer.Argument(help="The folder of the package.")],
    runtime: Annotated[
        RuntimeName,
        typer.Option(help="What answers the golden cases: ONNX Runtime, onnxruntime-web in Node, or ExecuTorch."),
    ] = RuntimeName.ort,
    key: Annotated[Path | None, typer.Option(help="Public key, in PEM, of whoever must have signed it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check sums, manifest, signature, contract and golden cases of a package. Exit code 1 if one of them is wrong."""
    if runtime is RuntimeName.ort:
        _confined(path)
    from isthmus.features.package.inspect import inspect
    from isthmus.features.package.signature import read_public_key

    inspection = inspect(path, key=None if key is None else read_public_key(key), runtime=_MADE[runtime]())
    judge(inspection.as_dict(), partial(_show, inspection), inspection.require, as_json=as_json)


def _confined(package: Path) -> None:
    """Goes on where a graph may end the process, compute without end, or ask for all the memory that there is.

    Raises:
        PackageError: a signal ended it.
    """
    from isthmus.features.package.sandbox import apart, confine, limit

    ended = apart()
    if ended is None:
        limit(SECONDS)
        confine(MEMORY)
    elif ended >= 0:
        sys.exit(ended)  # all is said
    else:
        name = signal.Signals(-ended).name
        found = f"it took more than {SECONDS} seconds" if name == "SIGXCPU" else f"{name} ended ONNX Runtime"
        raise PackageError(str(package), found, expected="model files that answer", remedy=REMEDY)


def _onnx_runtime() -> "Runtime":
    from isthmus.features.package.inspect import OnnxRuntime

    return OnnxRuntime()


def _web_runtime() -> "Runtime":
    from isthmus.orchestration.runtimes.web import WebRuntime

    return WebRuntime()


def _executorch_runtime() -> "Runtime":
    from isthmus.orchestration.runtimes.executorch import ExecuTorchRuntime

    return ExecuTorchRuntime()


_MADE = {
    RuntimeName.ort: _onnx_runtime,
    RuntimeName.web: _web_runtime,
    RuntimeName.executorch: _executorch_runtime,
}
RUNTIMES: Mapping[str, Callable[[], "Runtime"]] = {
    "ONNX Runtime": _onnx_runtime,
    "onnxruntime-web": _web_runtime,
    "ExecuTorch": _executorch_runtime,
}
"""What runs model files, by the name that people know."""


def _show(inspection: "Inspection") -> None:
    from rich.text import Text

    table = new_table("check", "", "found", words=True)
    # A package may hold what the terminal would take for markup, and lines of any length.
    table.columns[-1].no_wrap = False
    for check in inspection.checks:
        table.add_row(Text(check.subject), "ok" if check.error is None else "refused", Text(harmless(check.found)))
    new_console().print(table)


def show_ladder(ladder: "Ladder") -> None:
    """Prints the rungs: what was asked, how far it is from the student, and what is allowed."""
    from rich.text import Text

    table = new_table("form", "runtime", "", "found", "allowed", words=True)
    table.columns[3].no_wrap = False
    words = {True: "holds", False: "breaks", None: "unknown"}
    for rung in ladder.rungs:
        allowed = f"{rung.tolerance:g}" if rung.tolerance else ""
        table.add_row(Text(rung.form), rung.runtime, words[rung.holds], Text(harmless(rung.found)), allowed)
    new_console().print(table)
