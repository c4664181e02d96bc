"""The step: a trained student becomes a package, if it agrees with itself and keeps to its budgets."""

import dataclasses
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from isthmus.distill.account import Progress
from isthmus.distill.evaluate import interleaved, throughput
from isthmus.distill.footprint import footprint
from isthmus.distill.gates import against
from isthmus.distill.golden import spread
from isthmus.distill.kind import Restored, restored
from isthmus.distill.package import package_bytes, write_package
from isthmus.distill.quantize import quantize
from isthmus.distill.runtime import ask, described, ort_format, predict, session
from isthmus.distill.split import Index
from isthmus.distill.task import Answers, Array, Case, Material, Task
from isthmus.distill.teaching import taught
from isthmus.features.errors import GateFailed
from isthmus.features.golden import Case as GoldenCase
from isthmus.features.golden import Golden, Kept
from isthmus.features.manifest import (
    FORMAT_VERSION,
    Feeds,
    Manifest,
    Variant,
    package_digest,
    placed,
)
from isthmus.features.profiles import ServingProfile

CALIBRATION_ROWS = 2048


@dataclass(frozen=True)
class ExportReport:
    """What an export gave.

    Attributes:
        path: the package folder.
        digest: SHA-256 of its sums.
        contract: hash of the contract.
        bytes: of a package that ships one precision only, by precision.
        worst: largest difference from the student in torch, per model file, on the golden cases and on test rows.
        quality: on the test part, per model file, by measure.
        left_out: precision to why the package has no file of it.
        latency: p50_us and p99_us of one row with the runtime, precision and threads of the serving profile.
        requests_per_second: of one row each, one after the other, with the same.
        runtime: what answered.
        memory_mb: MiB by which a process grows when it opens that model and answers one row.
        seconds: of the whole step.
    """

    path: Path
    digest: str
    contract: str
    bytes: dict[str, int]
    worst: dict[str, float]
    quality: dict[str, dict[str, float | None]]
    left_out: dict[str, str]
    latency: dict[str, float]
    requests_per_second: float
    runtime: str
    memory_mb: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


def export(
    material: Material,
    model_folder: Path,
    packages: Path,
    *,
    contract: Mapping[str, Any],
    profile: ServingProfile,
    cache: Path,
    progress: Progress = lambda _text, _done: None,
) -> ExportReport:
    """Writes the package of a trained student to `packages/<name>-<digest>`. The same student gives the same bytes.

    A precision whose answers are too far from the student's, or whose quality does not reach a gate, is left out; if it
    is the one to be served, nothing is written.

    Args:
        material: what the student was trained with.
        model_folder: what `distill` wrote.
        packages: folder of all packages.
        contract: the compiled contract as plain data.
        profile: what the package must keep to.
        cache: of the teacher's outputs.
        progress: is told what is done and the share of all that is done.

    Raises:
        ContractMismatch: the student was trained under another contract, on other rows, or as another declaration.
        DataError: the student cannot be read.
        GateFailed: the variant to serve differs too much from the student, is not good enough, too slow or too large.
    """
    started = time.perf_counter()
    found = restored(material, model_folder)
    task, parts = found.task, material.parts
    progress("read", 0.1)
    edges = task.edges(found.student)
    models = _models(task, found, edges)
    progress("converted", 0.3)
    golden = [task.case(found.student, parts.test[spread(len(parts.test), task.golden)]), *edges]
    check = _Check(task, found, golden, cache, profile)
    variants: list[Variant] = []
    outputs: dict[str, list[dict[str, Array]]] = {}
    left_out: dict[str, str] = {}
    for precision in task.tolerance:
        files = {file: model for file, model in models.items() if file.split(".")[1] == precision}
        try:
            checked = [check.of(file, model) for file, model in files.items()]
        except GateFailed as error:
            if precision == profile.precision:
                raise
            left_out[precision] = str(error)
            continue
        variants += [variant for variant, _ in checked]
        outputs |= {variant.file: answers for variant, answers in checked}
        progress(f"compared {precision}", 0.3 + 0.2 * len(variants) / 2)
    timing, rate, memory = _budgets(models[f"model.{profile.precision}.ort"], task.feeds(parts.test[:1]), profile)
    progress("measured", 0.9)

    example = onnx.load_model_from_string(models[f"model.{profile.precision}.onnx"])
    head = material.head.fed(material.student_inputs) if golden[0].rows else ()
    shipped = task.shipped()
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name=material.declaration.name,
        contract=material.contract,
        service=material.declaration.student.name,
        model=found.id,
        training_set=material.training_set,
        task=material.declaration.task if isinstance(material.declaration.task, str) else "tabular",
        metric=task.metric,
        inputs=placed(head),
        tensors=tuple(map(described, example.graph.input)),
        outputs=tuple(map(described, example.graph.output)),
        variants=tuple(variants),
        files={name: purpose for name, (_, purpose) in shipped.items()},
    )
    cases = tuple(
        GoldenCase(
            {name: Kept.of(array) for name, array in case.feeds.items()},
            {file: {name: Kept.of(array) for name, array in of[place].items()} for file, of in outputs.items()},
            tuple(case.rows),
        )
        for place, case in enumerate(golden)
    )
    kept = {variant.file: models[variant.file] for variant in variants}
    files = kept | {name: content for name, (content, _) in shipped.items()}
    columns = tuple(dict.fromkeys(item.name for item in head))
    served = f"model.{profile.precision}.ort"
    path = write_package(packages, manifest, contract, Golden(columns, cases), files, served)
    report = ExportReport(
        path,
        package_digest(path),
        material.contract,
        {precision: package_bytes(path, precision) for precision in task.tolerance if precision not in left_out},
        {variant.file: variant.worst for variant in variants},
        {variant.file: variant.quality for variant in variants},
        left_out,
        timing,
        rate,
        f"ONNX Runtime {onnxruntime.__version__}",
        memory,
        round(time.perf_counter() - started, 3),
    )
    progress(f"package {path.name}", 1.0)
    return report


def _models(task: Task, found: Restored, edges: Sequence[Case]) -> dict[str, bytes]:
    model = task.model(found.student)
    # Exporters note where in the source a node comes from: it is nobody's business, and differs between machines.
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    learned = task.material.parts.train
    rows = learned[spread(len(learned), CALIBRATION_ROWS)]
    calibration = [*_in_parts(task, rows), *(case.feeds for case in edges)]
    fp32, int8 = model.SerializeToString(deterministic=True), quantize(model, calibration, task.quantized)
    return {
        "model.fp32.onnx": fp32,
        "model.fp32.ort": ort_format(fp32),
        "model.int8.onnx": int8,
        "model.int8.ort": ort_format(int8),
    }


def _in_parts(task: Task, rows: Index) -> list[Feeds]:
    return [task.feeds(rows[begin : begin + task.at_once]) for begin in range(0, len(rows), task.at_once)]


class _Check:
    """Compares model files with the student, and says how good they are."""

    def __init__(
        self, task: Task, found: Restored, golden: Sequence[Case], cache: Path, profile: ServingProfile
    ) -> None:
        self._task, self._golden, self._profile = task, golden, profile
        test = task.material.parts.test
        some = test[spread(len(test), task.compared)]
        self._cases = [
            task.case(found.student, some[begin : begin + task.at_once]) for begin in range(0, len(some), task.at_once)
        ]
        whole = np.arange(task.material.table.num_rows)
        outputs, _ = taught(task, task.teacher(), whole, cache, lambda _text, _done: None)
        self._taught = {key: tensor.float().numpy() for key, tensor in outputs[test].items()}

    def of(self, file: str, model: bytes) -> tuple[Variant, list[dict[str, Array]]]:
        """A file, and its answers in the golden cases.

        Raises:
            GateFailed: it differs too much from the student, or is not good enough.
        """
        task, (_, precision, form) = self._task, file.split(".")
        run = partial(ask, session(model, self._profile.threads))
        answers = [run(case.feeds) for case in self._golden]
        pairs = [*zip(self._golden, answers, strict=True), *((case, run(case.feeds)) for case in self._cases)]
        # NumPy's: Python's loses a NaN.
        worst = float(np.max([difference(case.expected, found) for case, found in pairs]))
        # `not <=` and not `>`: a NaN must not pass.
        if not worst <= task.tolerance[precision]:
            raise GateFailed(
                f"{file}: golden cases and test part",
                f"answers differ from the student's by up to {worst:.2g}",
                expected=f"at most {task.tolerance[precision]}",
                remedy="serve fp32, or train again" if precision == "int8" else "report this: the graph is wrong",
            )
        quality = self._quality(run)
        self._require(file, quality)
        return Variant(
            file=file,
            precision="int8" if precision == "int8" else "fp32",
            format="ort" if form == "ort" else "onnx",
            bytes=len(model),
            sha256=hashlib.sha256(model).hexdigest(),
            tolerance=task.tolerance[precision],
            worst=worst,
            quality={name: value if math.isfinite(value) else None for name, value in quality.items()},
        ), answers

    def _quality(self, run: Any) -> dict[str, float]:
        task, test = self._task, self._task.material.parts.test
        parts = [task.replies(run, test[begin : begin + task.at_once]) for begin in range(0, len(test), task.at_once)]
        answers = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        return task.quality(answers, test, self._taught)

    def _require(self, file: str, quality: Mapping[str, float]) -> None:
        """The gates about the student hold for its file, too."""
        declared = self._task.material.declaration
        found = against({f"student.{name}": value for name, value in quality.items()}, declared.required)
        if failed := [one for one in found if not one.holds]:
            raise GateFailed(
                file,
                "; ".join(map(str, failed)),
                expected="; ".join(one.expected for one in failed),
                remedy="serve another precision, train longer, or change the gates in the definitions",
            )


def difference(expected: Answers, found: Answers) -> float:
    """The largest absolute difference between outputs of the same names; NaN if one lacks a number."""
    if expected.keys() != found.keys() or any(values.shape != found[name].shape for name, values in expected.items()):
        return math.nan
    apart = [np.abs(values.astype(np.float64) - found[name]).max(initial=0.0) for name, values in expected.items()]
    return float(np.max(apart))


def _budgets(model: bytes, row: Feeds, profile: ServingProfile) -> tuple[dict[str, float], float, float]:
    opened = session(model, profile.threads)
    (timing,) = interleaved({"": partial(predict, opened, row)}, calls=2000).values()
    rate = throughput(partial(predict, opened, row))
    memory = footprint(model, row, profile.threads)
    where = "profiles.serving"
    if timing["p99_us"] > profile.latency_objective_ms * 1000:
        raise GateFailed(
            f"{where}.latency_objective_ms",
            f"p99 of one row is {timing['p99_us'] / 1000:.3f} ms",
            expected=f"at most {profile.latency_objective_ms} ms",
            remedy="make the student smaller, allow more time, or measure on a machine that does nothing else",
        )
    if memory > profile.memory_mb:
        raise GateFailed(
            f"{where}.memory_mb",
            f"a session of the model takes {memory} MiB",
            expected=f"at most {profile.memory_mb} MiB",
            remedy="make the student smaller or allow more memory",
        )
    return timing, rate, memory
