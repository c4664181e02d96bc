"""The step: a trained student becomes a package, if it agrees with itself and keeps to its budgets."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import onnx
import onnxruntime
from torch import nn

from isthmus.distill.declaration import EXECUTORCH
from isthmus.distill.executorch import export as executorch
from isthmus.distill.executorch.export import converted, require_installed, running
from isthmus.distill.export.acceptance import Measured, Trial, allowed, fit, precisions
from isthmus.distill.export.package import contents, package_bytes, write_package
from isthmus.distill.onnx.quantize import quantize
from isthmus.distill.onnx.runtime import described, ort_format
from isthmus.distill.restore import restored
from isthmus.distill.tasks.task import Case, Material, Task
from isthmus.distill.types import Array, Index, spread
from isthmus.features.errors import ContractMismatch, GateFailed
from isthmus.features.package.golden import Case as GoldenCase
from isthmus.features.package.golden import Golden, TensorBytes
from isthmus.features.package.manifest import FORMAT_VERSION, Feeds, Manifest, Variant, package_digest, placed
from isthmus.features.profiles import ServingProfile
from isthmus.features.progress import Progress

CALIBRATION_ROWS = 2048

CALIBRATION_BYTES = 256 << 20
"""Of all calibration rows: 341 images of 256 x 256 pixels in three channels."""


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
        left_out: precision, or file for ExecuTorch, to why the package does not have it.
        served: what one row takes with the threads of the serving profile and its precision, or the fastest one.
        runtime: what answered.
        seconds: of the whole step.
    """

    path: Path
    digest: str
    contract: str
    bytes: dict[str, int]
    worst: dict[str, float]
    quality: dict[str, dict[str, float | None]]
    left_out: dict[str, str]
    served: Measured
    runtime: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**dataclasses.asdict(self), "path": str(self.path), "served": msgspec.structs.asdict(self.served)}


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
        ConfigurationError: a runtime is not installed that the package is to have a model for, or the task does not
            have the precision that is served.
        ContractMismatch: the student was trained under another contract, on other rows, or as another declaration.
        DataError: the student cannot be read.
        GateFailed: the variant to serve differs too much from the student, is not good enough, too slow or too large.
    """
    started = time.perf_counter()
    require_installed(material.declaration)
    found = restored(material, model_folder)
    if found.contract != material.contract:
        raise ContractMismatch(
            str(model_folder),
            f"trained under contract {found.contract[:12]}",
            expected=material.contract[:12],
            remedy="run training-set and distill again",
        )
    task = found.task
    allowed(task, profile)
    progress("read", 0.1)
    golden = task.cases(found.student)
    models = _models(task, found.student, task.edges(found.student))
    progress("converted", 0.3)
    trial = Trial(found, golden, cache, profile)
    variants: list[Variant] = []
    outputs: dict[str, list[dict[str, Array]]] = {}
    left_out: dict[str, GateFailed] = {}
    for precision in task.tolerance:
        files = {file: model for file, model in models.items() if file.split(".")[1] == precision}
        try:
            checked = [trial.of(file, model) for file, model in files.items()]
        except GateFailed as error:
            if precision == profile.precision:
                raise
            left_out[precision] = error
            continue
        variants += [variant for variant, _ in checked]
        outputs |= {variant.file: answers for variant, answers in checked}
        progress(f"compared {precision}", 0.3 + 0.2 * len(variants) / 2)
    if not variants:
        raise next(iter(left_out.values()))
    kept = {variant.file: models[variant.file] for variant in variants}
    example = onnx.load_model_from_string(models["model.fp32.onnx"])
    tensors, given = (tuple(map(described, values)) for values in (example.graph.input, example.graph.output))
    for file, calibration in _programs(task) if EXECUTORCH in material.declaration.runtimes else ():
        try:
            program = converted(task, found.student, material.parts.test[:1], tensors, given, calibration)
            with running(program, tensors, given) as run:
                variant, outputs[file] = trial.of(file, program.model, run, program.max_sizes)
            variants.append(variant)
            kept[file] = program.model
            progress(f"compared {file}", 0.8)
        except GateFailed as error:
            left_out[file] = error
            progress(f"no {file}: {error}", 0.8)
    head = material.request_inputs.fed(material.student_inputs) if golden[0].rows else ()
    shipped = task.shipped(trial.taught)
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
        tensors=tensors,
        outputs=given,
        variants=tuple(variants),
        files={name: purpose for name, (_, purpose) in shipped.items()},
    )
    cases = tuple(
        GoldenCase(
            {name: TensorBytes.of(array) for name, array in case.feeds.items()},
            {file: {name: TensorBytes.of(array) for name, array in of[place].items()} for file, of in outputs.items()},
            tuple(case.rows),
        )
        for place, case in enumerate(golden)
    )
    files = kept | {name: content for name, (content, _) in shipped.items()}
    columns = tuple(dict.fromkeys(item.name for item in head))
    whole = contents(manifest, contract, Golden(columns, cases), files)
    sizes = {one: package_bytes(whole, one) for one in task.tolerance if one not in left_out}
    served = {precision: kept[f"model.{precision}.ort"] for precision in precisions(kept, profile)}
    measured = fit(served, _row(task), sizes, profile)
    progress("measured", 0.9)
    path = write_package(packages, manifest.name, whole)
    report = ExportReport(
        path,
        package_digest(path),
        material.contract,
        sizes,
        {variant.file: variant.worst for variant in variants},
        {variant.file: variant.quality for variant in variants},
        {precision: str(error) for precision, error in left_out.items()},
        measured,
        f"ONNX Runtime {onnxruntime.__version__}",
        round(time.perf_counter() - started, 3),
    )
    progress(f"package {path.name}", 1.0)
    return report


def _models(task: Task, student: nn.Module, edges: Sequence[Case]) -> dict[str, bytes]:
    model = plain(task, student)
    fp32, int8 = (in_precision(task, model, precision, edges) for precision in ("fp32", "int8"))
    return {
        "model.fp32.onnx": fp32,
        "model.fp32.ort": ort_format(fp32),
        "model.int8.onnx": int8,
        "model.int8.ort": ort_format(int8),
    }


def _programs(task: Task) -> list[tuple[str, Index | None]]:
    """Files for ExecuTorch, and the rows that each is calibrated on."""
    learned = task.material.parts.train
    return [(executorch.FILE, None), (executorch.QUANTIZED, learned[spread(len(learned), executorch.CALIBRATION_ROWS)])]


def plain(task: Task, student: nn.Module) -> onnx.ModelProto:
    """The graph of a student, and nothing about the machine that made it."""
    model = task.model(student)
    # Exporters note where in the source a node comes from: it is nobody's business, and differs between machines.
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    return model


def in_precision(task: Task, model: onnx.ModelProto, precision: str, edges: Sequence[Case]) -> bytes:
    """A graph in fp32 or int8, as ONNX. Ranges are those of training rows and of what no row holds.

    They are held in memory all at once: there are fewer where a row is large, but never less than a part.
    """
    if precision == "fp32":
        return bytes(model.SerializeToString(deterministic=True))
    learned = task.material.parts.train
    size = sum(tensor.nbytes for tensor in task.feeds(learned[:1]).values())
    wanted = min(CALIBRATION_ROWS, max(task.at_once, CALIBRATION_BYTES // max(1, size)))
    rows = learned[spread(len(learned), wanted)]
    return quantize(model, [*_in_parts(task, rows), *(case.feeds for case in edges)], task.quantized)


def _in_parts(task: Task, rows: Index) -> list[Feeds]:
    return [task.feeds(rows[begin : begin + task.at_once]) for begin in range(0, len(rows), task.at_once)]


def _row(task: Task) -> Feeds:
    return task.feeds(task.material.parts.test[:1])
