"""Check a model file against its package: graph, input tensors and golden cases. `deviation` measures a difference."""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from threading import Timer
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from isthmus.features.errors import DataError, DependencyError, PackageError
from isthmus.features.profiles import ServingDevice
from isthmus.package.featurizer.form import HEAD
from isthmus.package.featurizer.interpreter import Head
from isthmus.package.golden import Golden, TensorBytes
from isthmus.package.inputs import Feeds, ModelInput, feeds
from isthmus.package.manifest import ROUNDING, Manifest, Package, TensorInfo, Variant

if TYPE_CHECKING:
    import onnxruntime

GOLDEN_TOLERANCE = ROUNDING
"""Largest difference from the recorded outputs: the last bits of outputs differ between CPUs."""

SECONDS = 120
"""Time limit for answering all golden cases, or all golden prompts."""

_CUDA = "CUDAExecutionProvider", {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}
_PROVIDERS: Mapping[ServingDevice, Sequence[tuple[str, dict[str, str]]]] = {
    "cpu": (),
    "cuda": (_CUDA,),
    "tensorrt": (("TensorrtExecutionProvider", {}), _CUDA),
}
"""ONNX Runtime's execution providers for each device. The CPU runs operators that a GPU cannot run."""

_NEGATION = (
    b'\x08\x07\x12\x00:2\n\x0b\n\x01x\x12\x01y"\x03Neg\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01b\x0f\n\x01y'
    b"\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)
"""An ONNX model with a single operator, to try a device before the work that needs it."""

_ROWS = 16
"""Rows computed by a featurizer at once."""

Array = np.ndarray[Any, Any]
Answers = Mapping[str, Array]
"""Outputs of a model by name."""


class Deviation(NamedTuple):
    """The output value farthest from its expected value, as texts for a message.

    `by` is the absolute difference, infinite for NaN, another type or shape; `limit` is the largest one accepted.
    """

    place: str
    found: str
    expected: str
    by: float
    limit: float

    @property
    def share(self) -> float:
        return self.by / self.limit if self.by and self.limit else self.by and np.inf

    def message(self, reference: str) -> str:
        return f"answers {self.found} where {reference} answers {self.expected}, {self.by:.3g} apart"


def deviation(
    name: str, expected: Array, found: Array, limit: float, *, widths: bool = False,
    row_name: Callable[[int], str] = "row {}".format,
) -> Deviation:  # fmt: skip
    """Compare a model's output `found` with the expected output; return the value that differs most from its limit.

    `limit` is the largest allowed absolute difference. The function does not judge: the caller compares `by` of the
    result with its `limit`. `name` is the name of the output, and `row_name` turns a row number into text. Both go into
    the result for error messages.

    The difference is infinite if a value is NaN on either side (even on both), if shape or element type differ, and for
    unequal integers if `limit` is below 1. With `widths`, float32 and float64 may be compared, and the limit of each
    value is at least `rounding(expected)`.
    """
    floats = expected.dtype.kind == found.dtype.kind == "f"
    if expected.shape != found.shape or (expected.dtype != found.dtype and not (floats and widths)):
        form, expected_form = (f"{array.dtype} {list(array.shape)}" for array in (found, expected))
        return Deviation(f"output {name}", form, expected_form, np.inf, limit)
    if not found.size:
        return Deviation(f"output {name}", "nothing", "nothing", 0.0, limit)
    distance = np.where(expected == found, 0.0, np.inf)
    if floats or (found.dtype.kind in "iu" and limit >= 1):
        with np.errstate(invalid="ignore", over="ignore"):
            gaps = np.abs(found.astype(np.float64) - expected)
        distance = np.where((distance == 0) | np.isnan(gaps), distance, gaps)
    limits = np.maximum(limit, rounding(expected) if widths and floats else np.zeros(distance.shape))
    place = np.unravel_index(int(relative_differences(distance, limits).argmax()), distance.shape)
    row, *rest = map(int, place or (0,))
    inside = f"[{', '.join(map(str, rest))}]" if rest else ""
    actual, target = (f"{x[place]:.9g}" if x.dtype.kind == "f" else str(x[place]) for x in (found, expected))
    return Deviation(
        f"{row_name(row)}, output {name}{inside}", actual, target, float(distance[place]), float(limits[place])
    )


def rounding(numbers: Array) -> Array:
    """Return the error that float32 rounding may cause in each number: twice the gap to the next float32.

    The error is 0 for a number that is not finite as float32.
    """
    with np.errstate(over="ignore"):
        return 2 * np.nan_to_num(np.spacing(np.abs(numbers).astype(np.float32))).astype(np.float64)


def relative_differences(distance: Array, limits: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance > 0, distance / limits, 0.0)


def session_options(threads: int) -> "onnxruntime.SessionOptions":
    import onnxruntime  # readers of a package do not need it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def require_device(device: ServingDevice) -> None:
    """Check that ONNX Runtime can run models on the device of `[profiles.serving]`. Takes a moment for a GPU.

    By itself, ONNX Runtime only warns and uses the CPU. Raises DependencyError if the installed build of ONNX
    Runtime does not support the device, or cannot start it here.
    """
    if device == "cpu":
        return
    import onnxruntime

    provider, packages = _PROVIDERS[device][0][0], "onnxruntime-gpu[cuda,cudnn]"
    if device == "tensorrt":
        packages += " and tensorrt<11"
    if provider not in onnxruntime.get_available_providers():
        problem, first = f"ONNX Runtime {onnxruntime.__version__} has no {provider}", "uninstall onnxruntime"
    else:
        with redirect_stdout(sys.stderr), suppress(ImportError, OSError):  # callers of `--json` parse stdout
            if device == "tensorrt":
                # NVIDIA's variable: unlike the other provider, TensorRT's has no option against TF32.
                os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
            onnxruntime.preload_dlls()
            if device == "tensorrt":
                importlib.import_module("tensorrt_libs")  # loads TensorRT where pip has installed it
        with suppress(Exception):  # onnxruntime's exceptions have no base class of their own
            if provider in _opened(_NEGATION, session_options(1), device).get_providers():
                return
        problem, first = f"ONNX Runtime cannot start {provider} (its messages say why)", "check the GPU's driver"
    raise DependencyError(
        "profiles.serving.device", f'"{device}", but {problem}', expected="a GPU and the libraries of its provider",
        remedy=f'{first} and install {packages}, or set device = "cpu"', passes=False,
    )  # fmt: skip


def _opened(
    model: bytes, options: "onnxruntime.SessionOptions", device: ServingDevice
) -> "onnxruntime.InferenceSession":
    import onnxruntime

    providers = [*_PROVIDERS[device], "CPUExecutionProvider"]
    # The fallback prints to stdout, which callers of `--json` parse.
    return onnxruntime.InferenceSession(model, options, providers=providers, enable_fallback=0)


def open_session(
    package: Package, variant: Variant, threads: int, device: ServingDevice = "cpu"
) -> "onnxruntime.InferenceSession":
    """Open a model file in ONNX Runtime on a device. Checks the names and types of its tensors, but runs nothing.

    Raises PackageError if ONNX Runtime rejects the file, or would run all of it on the CPU although `device` is another
    one. Raises DependencyError if the device is not available.
    """
    require_device(device)
    manifest, options = package.manifest, session_options(threads)
    # The length of a text changes with each token, and ONNX Runtime would keep a memory plan for each length.
    options.enable_mem_pattern = manifest.generation is None
    # By default it opens files that a graph names, relative to the working folder.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    if device != "cpu":
        options.use_deterministic_compute = True
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    model = package.files.read(variant.file)
    beside = {name: package.files.read(name) for name in manifest.files} if variant.format == "onnx" else {}
    try:
        if beside:
            sizes = [len(data) for data in beside.values()]
            options.add_external_initializers_from_files_in_memory([*beside], [*beside.values()], sizes)
        session = _opened(model, options, device)
    except Exception as error:  # onnxruntime's exceptions have no base class of their own
        raise rejection_error(manifest, variant, "onnxruntime", error) from error
    if device != "cpu":
        used = {subgraph.ep_name for subgraph in session.get_provider_graph_assignment_info()}
        if used.isdisjoint(provider for provider, _ in _PROVIDERS[device]):
            reason = f"it would run on {', '.join(sorted(used))} only"
            raise rejection_error(manifest, variant, f"onnxruntime on {device}", reason, 'set device = "cpu"')
    # ONNX Runtime has copied the weights but would keep the file's bytes for its lifetime.
    session._model_bytes = None
    _require_described(f"{_where(manifest, variant)}, inputs", manifest.tensors, session.get_inputs())
    _require_described(f"{_where(manifest, variant)}, outputs", manifest.outputs, session.get_outputs())
    return session


def answers(
    session: "onnxruntime.InferenceSession", manifest: Manifest, variant: Variant, batches: Sequence[Feeds]
) -> list[Answers]:
    names = [output.name for output in manifest.outputs]
    with run_limits(manifest, variant) as options:
        return [dict(zip(names, session.run(names, fed, options), strict=True)) for fed in batches]


@contextmanager
def run_limits(manifest: Manifest, variant: Variant) -> Iterator["onnxruntime.RunOptions"]:
    """Limit ONNX Runtime runs in a `with` block to two minutes in all, since a package's graph may loop forever.

    Pass the yielded options to each `session.run`. Any error in the block becomes a PackageError about the model file
    `variant`.
    """
    import onnxruntime

    options = onnxruntime.RunOptions()
    # A malicious graph may loop forever.
    clock = Timer(SECONDS, setattr, (options, "terminate", True))
    clock.start()
    try:
        yield options
    except PackageError:
        raise
    except Exception as error:  # onnxruntime's exceptions have no base class of their own
        reason = f"no answer in {SECONDS} seconds" if options.terminate else error
        raise rejection_error(manifest, variant, "onnxruntime", reason) from error
    finally:
        clock.cancel()


def rejection_error(
    manifest: Manifest, variant: Variant, runtime: str, error: object, remedy: str = "export the model again"
) -> PackageError:
    return PackageError(_where(manifest, variant), f"{runtime} refuses it ({error})", remedy=remedy)


def check_input_tensors(where: str, golden: Golden, inputs: Sequence[ModelInput]) -> int:
    rows = 0
    for number, case in enumerate(golden.cases if inputs else ()):
        try:
            tensors = feeds(inputs, golden.columns(case, inputs))
        except (DataError, ValueError) as error:
            raise PackageError(f"{where}, case {number}", str(error), expected="rows of the inputs") from error
        for name in {**tensors, **case.tensors}:
            if name not in tensors or case.tensors.get(name) != TensorBytes.of(tensors[name]):
                raise PackageError(
                    f"{where}, case {number}", f"its rows do not reproduce the recorded tensor {name}",
                    expected="equal bit for bit", remedy="export the model again",
                )  # fmt: skip
        rows += len(case.rows)
    return rows


def check_featurizer(package: Package, golden: Golden) -> int:
    manifest, rows, end = package.manifest, 0, time.monotonic() + SECONDS
    where = f"package {manifest.name}: {HEAD}"
    head = Head.loads(package.files.read(HEAD), where)
    types = {item.name: item.dtype for item in manifest.inputs}
    if unlike := [item for item in head.form.inputs if types.get(item.name) != item.dtype]:
        raise PackageError(
            where, f"reads {unlike[0].name} as a {unlike[0].dtype}", expected="the inputs of the manifest",
            remedy="export the model again",
        )  # fmt: skip
    for number, case in enumerate(golden.cases):
        columns, core = golden.columns(case, manifest.model_inputs), {name: of.array for name, of in case.core.items()}
        for begin in range(0, len(case.rows), _ROWS):
            batch = slice(begin, begin + _ROWS)
            tensors, _ = head.feeds({name: values.take(batch) for name, values in columns.items()})
            for name in {**tensors, **core}:
                expected = core[name][batch] if name in core else None
                if expected is None or name not in tensors or TensorBytes.of(tensors[name]) != TensorBytes.of(expected):
                    raise PackageError(
                        f"{where}, case {number}", f"its rows do not reproduce the recorded tensor {name}",
                        expected="equal bit for bit", remedy="export the model again",
                    )  # fmt: skip
            if time.monotonic() > end:
                raise PackageError(where, f"no answer in {SECONDS} seconds", expected="the golden rows of a core")
        rows += len(case.rows)
    return rows


def require_reproduced(
    golden: Golden,
    manifest: Manifest,
    variant: Variant,
    outputs: Sequence[Answers],
    tolerance: float = GOLDEN_TOLERANCE,
    *,
    device: ServingDevice = "cpu",
) -> float:
    """Check that a model file still computes its recorded outputs; return the largest absolute difference.

    `outputs` has what the file `variant` computed now for each golden case (a batch of recorded inputs), by output
    name. Raises PackageError if a value differs by more than `tolerance * manifest.rounding / 1e-5`, or than
    `variant.rounding` if that is larger: both state how much outputs differ between processors. A `device` other than
    the CPU computes in another order, so differences of up to `variant.tolerance` also pass.
    """
    tolerance = max(tolerance * manifest.rounding / ROUNDING, variant.rounding or 0.0)
    if device != "cpu":
        tolerance = max(tolerance, variant.tolerance)
    worst = 0.0
    for number, (case, actual) in enumerate(zip(golden.cases, outputs, strict=True)):
        for name, recorded in case.outputs[variant.file].items():
            far = deviation(name, recorded.array, actual[name], tolerance)
            if far.by > tolerance:
                raise PackageError(
                    f"{_where(manifest, variant)}, golden case {number}, {far.place}",
                    f"does not reproduce its golden outputs: {far.message('the package')}",
                    expected=f"differences of at most {tolerance:g}",
                    remedy="export the model again with this release",
                )  # fmt: skip
            worst = max(worst, far.by)
    return worst


def _require_described(where: str, tensors: Sequence[TensorInfo], actual: Sequence[Any]) -> None:
    described = {tensor.name: tensor for tensor in tensors}
    names = [value.name for value in actual]
    if sorted(names) != sorted(described):
        expected = ", ".join(described)
        raise PackageError(where, ", ".join(names) or "nothing", expected=expected, remedy="export the model again")
    for value in actual:
        tensor = described[value.name]
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        # Names of variable dimensions depend on the runtime, so compare only fixed sizes.
        fixed, theirs = (tuple(size if isinstance(size, int) else None for size in of.shape) for of in (tensor, value))
        if kind != tensor.element or fixed != theirs:
            raise PackageError(
                f"{where}: {value.name}", f"{kind} {list(value.shape)}",
                expected=f"{tensor.element} {list(tensor.shape)}", remedy="export the model again",
            )  # fmt: skip


def _where(manifest: Manifest, variant: Variant) -> str:
    return f"package {manifest.name}: {variant.file}"
