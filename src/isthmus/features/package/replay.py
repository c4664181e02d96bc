"""Whether a model file still answers as its package says: its graph, what it is fed, its golden cases.

A server asks this of the file it is about to serve, `isthmus package verify` of every file, in any runtime.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.features.errors import DataError, PackageError
from isthmus.features.package.golden import Golden, TensorBytes
from isthmus.features.package.manifest import Feeds, Manifest, Tensor, Variant, feeds

if TYPE_CHECKING:
    import onnxruntime

GOLDEN_TOLERANCE = 1e-5
"""Largest difference from the recorded outputs: the same file gives other last bits on another CPU."""

SECONDS = 120
"""In which all golden cases must be answered."""

Array = np.ndarray[Any, Any]
Answers = Mapping[str, Array]
"""The outputs of a model by name."""


def open_session(folder: Path, manifest: Manifest, variant: Variant, threads: int) -> "onnxruntime.InferenceSession":
    """A session of ONNX Runtime over a model file, whose graph is the one that the manifest describes.

    Raises:
        PackageError: the runtime refuses the file, or it is another graph.
    """
    import onnxruntime  # not needed by those who only read a package

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as its latency was measured
    file = folder / variant.file
    try:
        # Whoever asks by `--json` reads stdout, on which the fallback would say that it tries the same again.
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:  # onnxruntime's exceptions have no base class of their own
        raise refused(manifest, variant, "onnxruntime", error) from error
    for what, described, found in (
        ("input", manifest.tensors, session.get_inputs()),
        ("output", manifest.outputs, session.get_outputs()),
    ):
        _require_described(f"{_where(manifest, variant)}, {what}s", described, found)
    return session


def answers(
    session: "onnxruntime.InferenceSession", manifest: Manifest, variant: Variant, asked: Sequence[Feeds]
) -> list[Answers]:
    """What a session answers when it is fed each of some tensors.

    Raises:
        PackageError: it does not answer.
    """
    import onnxruntime  # not needed by those who only read a package

    names, options = [output.name for output in manifest.outputs], onnxruntime.RunOptions()
    # A graph may loop for as long as its author likes.
    clock = Timer(SECONDS, setattr, (options, "terminate", True))
    clock.start()
    try:
        return [dict(zip(names, session.run(names, fed, options), strict=True)) for fed in asked]
    except Exception as error:  # onnxruntime's exceptions have no base class of their own
        reason = f"no answer in {SECONDS} seconds" if options.terminate else error
        raise refused(manifest, variant, "onnxruntime", reason) from error
    finally:
        clock.cancel()


def refused(manifest: Manifest, variant: Variant, runtime: str, error: object) -> PackageError:
    """A runtime that does not take a model file, or what it is fed."""
    return PackageError(_where(manifest, variant), f"{runtime} refuses it ({error})", remedy="export the model again")


def require_fed(where: str, golden: Golden, manifest: Manifest) -> int:
    """Refuses golden cases whose rows, made into tensors as everywhere, are not the recorded tensors to the bit.

    Returns:
        How many rows were compared; 0 if the package is none of rows.

    Raises:
        PackageError: with the case and the tensor that differ.
    """
    inputs, rows = manifest.model_inputs, 0
    for number, case in enumerate(golden.cases if inputs else ()):
        try:
            made = feeds(inputs, golden.columns(case, inputs))
        except (DataError, ValueError) as error:
            raise PackageError(f"{where}, case {number}", str(error), expected="rows of the inputs") from error
        for name in {**made, **case.tensors}:
            if name not in made or name not in case.tensors or TensorBytes.of(made[name]) != case.tensors[name]:
                raise PackageError(
                    f"{where}, case {number}", f"its rows do not make the tensor {name} that is recorded",
                    expected="the same to the bit", remedy="export the model again",
                )  # fmt: skip
        rows += len(case.rows)
    return rows


def require_reproduced(
    golden: Golden,
    manifest: Manifest,
    variant: Variant,
    found: Sequence[Answers],
    tolerance: float = GOLDEN_TOLERANCE,
) -> float:
    """The largest difference of a model file's answers in the golden cases from what is recorded of it.

    Args:
        golden: the cases.
        manifest: of the package.
        variant: the file.
        found: its answers, a case each.
        tolerance: the largest difference that passes; no number where one is recorded never does.

    Raises:
        PackageError: it is larger.
    """
    worst = max(
        _apart(kept.array, answered[name])
        for case, answered in zip(golden.cases, found, strict=True)
        for name, kept in case.outputs[variant.file].items()
    )
    if worst > tolerance:
        raise PackageError(
            _where(manifest, variant), f"does not reproduce its golden outputs: they differ by {worst:.3g}",
            expected=f"differences of at most {tolerance:g}", remedy="export the model again, with this release of it",
        )  # fmt: skip
    return worst


def _apart(expected: Array, found: Array) -> float:
    """The largest absolute difference; infinite if one of them is no number, or they are not of one kind."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return np.inf
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(expected, found) else np.inf
    with np.errstate(invalid="ignore"):
        apart = np.abs(expected.astype(np.float64) - found)
    apart = np.where(expected == found, 0.0, apart)  # of an infinite number from itself
    return float(np.where(np.isnan(apart), np.inf, apart).max(initial=0.0))


def _require_described(where: str, described: Sequence[Tensor], found: Sequence[Any]) -> None:
    told = {tensor.name: tensor for tensor in described}
    names = [value.name for value in found]
    if sorted(names) != sorted(told):
        raise PackageError(where, ", ".join(names) or "none", expected=", ".join(told), remedy="export the model again")
    for value in found:
        tensor = told[value.name]
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        # Of a size that differs from call to call a runtime may know another name, or none.
        fixed, theirs = (tuple(size if isinstance(size, int) else None for size in of.shape) for of in (tensor, value))
        if kind != tensor.element or fixed != theirs:
            raise PackageError(
                f"{where}: {value.name}", f"{kind} {list(value.shape)}",
                expected=f"{tensor.element} {list(tensor.shape)}", remedy="export the model again",
            )  # fmt: skip


def _where(manifest: Manifest, variant: Variant) -> str:
    return f"package {manifest.name}: {variant.file}"
