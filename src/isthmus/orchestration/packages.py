"""`isthmus package`: what whoever receives a package can ask of it. Needs no project, and no more than a server has."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.features.errors import PackageError
from isthmus.orchestration.options import JsonOption
from isthmus.orchestration.terminal import new_console, new_table, say, write_json

if TYPE_CHECKING:
    from isthmus.features.inspection import Inspection, Runtime

package = typer.Typer(help="Check a package, wherever it came from.", no_args_is_help=True, rich_markup_mode=None)


class RuntimeName(StrEnum):
    """What runs the model files."""

    ort = "ort"
    web = "web"
    executorch = "executorch"


@package.callback()
def _package() -> None:
    """Check a package, wherever it came from."""


@package.command()
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
    from isthmus.features.inspection import inspect
    from isthmus.features.signature import read_public_key

    inspection = inspect(path, key=None if key is None else read_public_key(key), runtime=_runtime(runtime))
    if as_json:
        write_json(inspection.as_dict())
    else:
        _show(inspection)
    try:
        inspection.require()
    except PackageError as error:
        if not as_json:
            raise
        # The inspection is the one document on stdout.
        say(str(error))
        raise typer.Exit(error.exit_code) from error


def _runtime(name: RuntimeName) -> "Runtime":
    if name is RuntimeName.web:
        from isthmus.orchestration.webruntime import WebRuntime

        return WebRuntime()
    if name is RuntimeName.executorch:
        from isthmus.orchestration.executorchruntime import ExecuTorchRuntime

        return ExecuTorchRuntime()
    from isthmus.features.inspection import OnnxRuntime

    return OnnxRuntime()


def _show(inspection: "Inspection") -> None:
    from rich.text import Text

    table = new_table("check", "", "found", words=True)
    # A package may hold what the terminal would take for markup, and lines of any length.
    table.columns[-1].no_wrap = False
    for check in inspection.checks:
        table.add_row(check.subject, "ok" if check.error is None else "refused", Text(check.found))
    new_console().print(table)
