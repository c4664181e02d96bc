"""The step: a trained student becomes a package, if it agrees with itself and keeps to its budgets."""

import dataclasses
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow as pa

from isthmus.distill.account import Progress
from isthmus.distill.dataset import Array, Tensors, columns, seen, tensors
from isthmus.distill.evaluate import auc, latency, sigmoid, throughput
from isthmus.distill.footprint import footprint
from isthmus.distill.golden import ROWS, edges, join, plain, spread, take
from isthmus.distill.graph import OUTPUT, graph
from isthmus.distill.head import Head
from isthmus.distill.package import package_bytes, write_package
from isthmus.distill.quantize import quantize
from isthmus.distill.runtime import ort_format, predict, session
from isthmus.distill.split import Index, Split, binary_labels, split_table
from isthmus.distill.student import Student, StudentRecord, load_student, read_record
from isthmus.features.columns import Values
from isthmus.features.errors import ContractMismatch, DataError, GateFailed
from isthmus.features.manifest import (
    FORMAT_VERSION,
    Feeds,
    Golden,
    Input,
    Manifest,
    ModelInput,
    Variant,
    feeds,
    package_digest,
)
from isthmus.features.profiles import ServingProfile
from isthmus.features.rowgraph import ELEMENTS, given

TOLERANCE: dict[str, float] = {"fp32": 1e-5, "int8": 0.05}
"""Largest absolute difference of probability from the student in torch."""
CALIBRATION_ROWS = 2048


@dataclass(frozen=True)
class ExportReport:
    """What an export gave.

    Attributes:
        path: the package folder.
        digest: SHA-256 of its sums.
        contract: hash of the contract.
        bytes: of a package that ships only fp32, or only int8.
        worst: largest difference of probability from the student in torch, per model file, on the golden rows and the
            test part.
        auc: on the test part, per model file.
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
    auc: dict[str, float]
    latency: dict[str, float]
    requests_per_second: float
    runtime: str
    memory_mb: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


def export(
    model_folder: Path,
    table: pa.Table,
    packages: Path,
    *,
    contract: Mapping[str, Any],
    contract_hash: str,
    service: str,
    profile: ServingProfile,
    head: Head | None = None,
    progress: Progress = lambda _text, _done: None,
) -> ExportReport:
    """Writes the package of a trained student to `packages/<name>-<digest>`. The same student gives the same bytes.

    Args:
        model_folder: what `distill` wrote.
        table: the training set the student learned from.
        packages: folder of all packages.
        contract: the compiled contract as plain data.
        contract_hash: its hash.
        service: name of the feature service the inputs come from.
        profile: what the package must keep to.
        head: the request transforms in the student's graph; None if it has none.
        progress: is told what is done and the share of all that is done.

    Raises:
        ContractMismatch: the student was trained under another contract.
        DataError: the student cannot be read, or the table is not the one it learned from.
        GateFailed: a variant differs too much from the student, or the one to serve is too slow or too large.
    """
    started = time.perf_counter()
    record, student = read_record(model_folder), load_student(model_folder)
    if record.contract != contract_hash:
        raise ContractMismatch(
            str(model_folder),
            f"trained under contract {record.contract[:12]}",
            expected=contract_hash[:12],
            remedy="run training-set and distill again",
        )
    head = head or Head()
    fed = head.fed(record.model_inputs)
    data, parts, labels = examples(record, table)
    raw = columns(table, fed)
    kept, golden = _golden(raw, data, parts.test, fed, head, record.model_inputs)
    test = feeds(fed, take(raw, parts.test))
    progress("read", 0.2)

    learned = take(raw, parts.train[spread(len(parts.train), CALIBRATION_ROWS)])
    extremes = edges(take(raw, parts.train[:1]), {item.name: item.dtype for item in fed})
    models = _models(student, head, feeds(fed, join(learned, extremes)))
    progress("converted", 0.4)
    expected = {"golden": sigmoid(student.logits(golden)), "test": sigmoid(student.logits(data[parts.test]))}
    outputs, variants = {}, []
    for file, model in models.items():
        opened = session(model, profile.threads)
        answers = {"golden": predict(opened, feeds(fed, kept)), "test": predict(opened, test)}
        variants.append(_variant(file, model, answers, expected, labels[parts.test]))
        outputs[file] = tuple(answers["golden"].astype(float).tolist())
    progress("compared", 0.7)
    timing, rate, memory = _budgets(models[f"model.{profile.precision}.ort"], feeds(fed, take(kept, slice(1))), profile)
    progress("measured", 0.9)

    inputs = _inputs(fed)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name=record.name,
        contract=contract_hash,
        service=service,
        model=record.id,
        training_set=record.training_set,
        inputs=inputs,
        output=OUTPUT,
        variants=tuple(variants),
    )
    golden_file = Golden(tuple(dict.fromkeys(item.name for item in inputs)), tuple(plain(kept, fed)), outputs)
    path = write_package(packages, manifest, contract, record.preparation, golden_file, models)
    report = ExportReport(
        path,
        package_digest(path),
        contract_hash,
        {precision: package_bytes(path, precision) for precision in TOLERANCE},
        {variant.file: variant.worst for variant in variants},
        {variant.file: variant.auc for variant in variants},
        timing,
        rate,
        f"ONNX Runtime {onnxruntime.__version__}",
        memory,
        round(time.perf_counter() - started, 3),
    )
    progress(f"package {path.name}", 1.0)
    return report


def examples(record: StudentRecord, table: pa.Table) -> tuple[Tensors, Split, Array]:
    """The inputs, parts and labels of the training set a student learned from.

    Raises:
        DataError: the table is another one.
    """
    parts = split_table(table, record.split)
    if parts.boundaries != record.boundaries:
        raise DataError(
            "training set",
            f"its parts begin at {parts.boundaries}",
            expected=f"the training set {record.training_set} of student {record.id} with {record.boundaries}",
            remedy="run distill again with this training set",
        )
    return tensors(table, record.model_inputs), parts, binary_labels(table, record.label, parts)


def _golden(
    given: Mapping[str, Values], data: Tensors, test: Index, fed: Sequence[ModelInput], head: Head,
    inputs: Sequence[ModelInput],
) -> tuple[dict[str, Values], Tensors]:  # fmt: skip
    """The golden rows as the graph is fed, and as the network sees them. An extreme that is refused is left out."""
    extremes = edges(take(given, test[:1]), {item.name: item.dtype for item in fed})
    complete, refused = head.complete(extremes)
    usual = test[spread(len(test), ROWS)]
    network = seen(take(complete, ~refused), inputs, int((~refused).sum()))
    first = data[usual]
    return join(take(given, usual), take(extremes, ~refused)), Tensors(
        np.concatenate([first.numeric, network.numeric]), np.concatenate([first.categories, network.categories])
    )


def _models(student: Student, head: Head, calibration: Feeds) -> dict[str, bytes]:
    model = graph(student, head)
    fp32, int8 = model.SerializeToString(deterministic=True), quantize(model, calibration)
    return {
        "model.fp32.onnx": fp32,
        "model.fp32.ort": ort_format(fp32),
        "model.int8.onnx": int8,
        "model.int8.ort": ort_format(int8),
    }


def _variant(
    file: str, model: bytes, answers: Mapping[str, Array], expected: Mapping[str, Array], labels: Array
) -> Variant:
    _, precision, form = file.split(".")
    worst = max(float(np.abs(answers[rows] - expected[rows]).max()) for rows in answers)
    # `not <=` and not `>`: a NaN must not pass.
    if not worst <= TOLERANCE[precision]:
        raise GateFailed(
            f"{file}: golden rows and test part",
            f"probabilities differ from the student by up to {worst:.2g}",
            expected=f"at most {TOLERANCE[precision]}",
            remedy="serve fp32, or train again" if precision == "int8" else "report this: the graph is wrong",
        )
    return Variant(
        file=file,
        precision="int8" if precision == "int8" else "fp32",
        format="ort" if form == "ort" else "onnx",
        bytes=len(model),
        sha256=hashlib.sha256(model).hexdigest(),
        tolerance=TOLERANCE[precision],
        worst=worst,
        auc=auc(labels, answers["test"]),
    )


def _budgets(model: bytes, row: Feeds, profile: ServingProfile) -> tuple[dict[str, float], float, float]:
    opened = session(model, profile.threads)
    timing = latency(lambda: predict(opened, row), calls=2000)
    rate = throughput(lambda: predict(opened, row))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.ort"
        file.write_bytes(model)
        memory = footprint(file, profile.threads)
    where = "profiles.serving"
    if timing["p99_us"] > profile.latency_objective_ms * 1000:
        raise GateFailed(
            f"{where}.latency_objective_ms",
            f"p99 of one row is {timing['p99_us'] / 1000:.3f} ms",
            expected=f"at most {profile.latency_objective_ms} ms",
            remedy="make `hidden` smaller, allow more time, or measure on a machine that does nothing else",
        )
    if memory > profile.memory_mb:
        raise GateFailed(
            f"{where}.memory_mb",
            f"a session of the model takes {memory} MiB",
            expected=f"at most {profile.memory_mb} MiB",
            remedy="make `hidden` smaller or allow more memory",
        )
    return timing, rate, memory


def _inputs(inputs: Sequence[ModelInput]) -> tuple[Input, ...]:
    counts: Counter[str] = Counter()
    result = []
    for item in inputs:
        tensor = given(ELEMENTS[item.dtype.name]) if item.row else "categories" if item.is_category else "numeric"
        result.append(Input(item.name, item.dtype.name, tensor, counts[tensor]))
        counts[tensor] += 1
    return tuple(result)
