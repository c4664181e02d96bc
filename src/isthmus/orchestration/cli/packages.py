"""`isthmus package`: checks for the recipient of a package. They need no project and only the server's libraries."""

import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from isthmus.features.errors import PackageError, RequestError
from isthmus.orchestration.cli.options import TARGET, JsonOption, local
from isthmus.orchestration.cli.screens.terminal import judge
from isthmus.package.checksums import REMEDY

if TYPE_CHECKING:
    from isthmus.distill.export.ladder import Ladder
    from isthmus.features.document.blocks import Block, Text
    from isthmus.package.inspect import Inspection

verbs = typer.Typer()
MEMORY = 8 << 30  # bytes that ONNX Runtime may use to verify a package
SECONDS = 600  # CPU seconds for it


@verbs.command()
def verify(
    path: Annotated[Path, typer.Argument(**local("Package folder."))],
    runtime: Annotated[
        Literal["ort", "web", "executorch", "litert", "coreml"],
        typer.Option(
            help="Runtime for the golden cases: ONNX Runtime, onnxruntime-web in Node, ExecuTorch, LiteRT, or an "
            "interpreter of the Core ML graph."
        ),
    ] = "ort",
    on: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help=f"Run ONNX Runtime on another machine: {TARGET}"),
    ] = None,
    key: Annotated[Path | None, typer.Option(**local("PEM file with the required signer's public key."))] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the checksums, manifest, contract and golden cases of a package, and with --key its signature.

    Exit code 1 if one fails.
    """
    if on is not None and runtime != "ort":
        raise RequestError("command line", f"--on runs ONNX Runtime, not {runtime}", remedy="drop --on or --runtime")
    if runtime == "ort" and on is None:
        _confined(path)
    from isthmus.orchestration.runtimes import products
    from isthmus.package.device.target import DeviceRuntime, Target
    from isthmus.package.inspect import inspect
    from isthmus.package.signature import read_public_key

    opened = products.open_runtime(runtime) if on is None else DeviceRuntime(Target.parse(on))
    inspection = inspect(path, key=None if key is None else read_public_key(key), runtime=opened)
    judge(inspection.as_dict(), partial(_inspection_blocks, inspection), inspection.require, as_json=as_json)


def _confined(package: Path) -> None:
    """Fork, and continue in the child with limits: an untrusted graph may crash, loop forever, or use all memory.

    The parent does not return: it exits with the child's code, or raises PackageError if a signal ended the child.
    """
    from isthmus.package.sandbox import fork_and_wait, limit_cpu, limit_memory

    ended = fork_and_wait()
    if ended is None:
        limit_cpu(SECONDS)
        limit_memory(MEMORY)
    elif ended >= 0:
        sys.exit(ended)  # the child has written everything
    else:
        name = signal.Signals(-ended).name
        reason = f"it took more than {SECONDS} seconds" if name == "SIGXCPU" else f"{name} ended ONNX Runtime"
        raise PackageError(str(package), reason, expected="model files that run within the limits", remedy=REMEDY)


def _inspection_blocks(inspection: "Inspection") -> "list[Block]":
    from isthmus.features.document.blocks import TableBlock, bad, good

    rows: list[list[Text]] = [
        [check.subject, good("ok") if check.error is None else bad("refused"), check.finding]
        for check in inspection.checks
    ]
    return [TableBlock(["check", "", "found"], rows)]


def ladder_blocks(ladder: "Ladder") -> "list[Block]":
    from isthmus.features.document.blocks import TableBlock, bad, good

    words: Mapping[bool | None, Text] = {True: good("holds"), False: bad("breaks"), None: "unknown"}
    rows: list[list[Text]] = [
        [rung.form, rung.runtime, words[rung.holds], rung.outcome, f"{rung.tolerance:g}" if rung.tolerance else ""]
        for rung in ladder.rungs
    ]
    return [TableBlock(["form", "runtime", "", "found", "allowed"], rows)]
