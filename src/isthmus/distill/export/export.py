"""The export step: package a trained student if its model files agree with it and fit their budgets."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
import onnxruntime

from isthmus.distill.decoder.writer import TextWriter
from isthmus.distill.export.acceptance import (
    Accepted,
    Measured,
    accept,
    allowed_precisions,
    exported_precisions,
    fastest_within_budget,
    int8_advice,
    require_fewer_bytes,
    require_smaller,
    served_models,
)
from isthmus.distill.export.candidate import Candidate, ParityLimits, StudentReference, sample_cases
from isthmus.distill.export.causal import ModelOrigin, TextFiles
from isthmus.distill.export.conversion import OPTIONAL, in_ort_format, in_precision
from isthmus.distill.export.package import contents, package_bytes, write_package, xctest
from isthmus.distill.labels import SEVERAL
from isthmus.distill.onnx.runtime import Run, tensor_info
from isthmus.distill.restore import REPORT, Restored, restore, same_training
from isthmus.distill.runtimes.conversions import INTERPRETED, conversions_for, require_runtimes
from isthmus.distill.runtimes.network import Portable, portable_part, run_program
from isthmus.distill.tasks.graph import student_graph
from isthmus.distill.tasks.task import Material
from isthmus.distill.training.teacheroutputs import complete_outputs
from isthmus.distill.types import Array
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ContractMismatch, GateFailed, ParityFailed
from isthmus.features.profiles import SMALLEST, ServingProfile
from isthmus.features.progress import Progress, silent
from isthmus.package.clients import CLIENTS, READERS, sources
from isthmus.package.featurizer.form import HEAD
from isthmus.package.golden import Golden, GoldenCase, TensorBytes
from isthmus.package.manifest import (
    CORE,
    FORMAT_VERSION,
    LONGEST,
    MODEL,
    DeviceManifest,
    Manifest,
    TensorInfo,
    package_digest,
    read_package,
    tensor_positions,
)


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    `bytes` is the size of a package with only one precision, by precision. `worst` and `quality` are by model file: the
    largest difference from the student in torch, and the metrics on the test part. `graph_parity` has the files that
    were compared by interpreting their graph, as their runtime is not here. `left_out` has the reason by missing
    precision or file. `served` is the cost of a row, as [profiles.serving] serves it. `advice` says why INT8 is not
    worth serving on this host; empty if it is.
    """

    path: Path
    digest: str
    contract: str
    bytes: dict[str, int]
    worst: dict[str, float]
    graph_parity: list[str]
    quality: dict[str, dict[str, float | None]]
    left_out: dict[str, str]
    served: Measured
    advice: str
    runtime: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self, enc_hook=str))


def export(  # noqa: PLR0913 - a step, and each argument is a choice of its caller
    material: Material,
    model_folder: Path,
    packages: Path,
    *,
    contract: Mapping[str, Any],
    profile: ServingProfile,
    cache: Path,
    device: DeviceManifest | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Write the package of a trained student to `packages/<name>-<digest>`. The same student gives the same bytes.

    Leaves out a model file that differs too much from the student, or whose metrics miss a gate such as "student.auc".
    Starts child processes to run other runtimes and to measure memory. If one of the errors below is raised, writes
    nothing except teacher outputs in the cache.

    Args:
        material: declaration and training set of the student.
        model_folder: folder of the student, as `distill` wrote it.
        packages: folder for packages.
        contract: schema of all features as plain data, which the package contains.
        profile: precision, threads and budgets for serving.
        cache: folder with stored outputs of teachers; missing outputs are added.
        device: describes the features that a device stores. With it, the package has the source code of the clients.
        progress: called with a line of text and the finished share, 0 to 1.

    Raises:
        ConfigurationError: a declared runtime is not installed, the task lacks the precision of `profile`, or the
            teacher cannot be loaded.
        ContractMismatch: contract, training set, declaration or reporting code changed since the training.
        DataError: the student, the training set or outputs of a teacher are damaged or do not fit.
        DependencyError: a Python library is missing, or the teacher fails or cannot be downloaded.
        GateFailed: fp32 differs from the student, or the file to serve differs or misses a gate or a budget.
    """
    started = time.perf_counter()
    require_runtimes(material.declaration)
    trained = _restored(material, model_folder)
    writer = trained.task.writer(trained.student)
    if writer is None:
        content = _of_rows(_Files(trained, cache, profile, progress), contract, device)
    else:
        content = _of_texts(trained, writer, contract, profile, cache, progress)
    path = write_package(packages, material.declaration.name, content.files)
    manifest = read_package(path)
    progress(f"package {path.name}", 1.0)
    return ExportReport(
        path=path,
        digest=package_digest(path),
        contract=material.contract,
        bytes=content.sizes,
        worst={variant.file: variant.worst for variant in manifest.variants},
        graph_parity=[variant.file for variant in manifest.variants if variant.format in INTERPRETED],
        quality={variant.file: variant.quality for variant in manifest.variants},
        left_out=content.left_out,
        served=content.served,
        advice=content.advice,
        runtime=f"ONNX Runtime {onnxruntime.__version__}",
        seconds=round(time.perf_counter() - started, 3),
    )


class _Content(NamedTuple):
    files: dict[str, bytes]
    sizes: dict[str, int]
    left_out: dict[str, str]
    served: Measured
    advice: str = ""


def _of_rows(files: "_Files", contract: Mapping[str, Any], device: DeviceManifest | None) -> _Content:
    task, profile, left_out = files.trained.task, files.profile, files.left_out
    test = task.material.parts.test
    files.accept_models()
    files.accept_programs()
    package = files.package(contract, device)
    sizes = {
        precision: package_bytes(package, precision) for precision in files.precisions if precision not in left_out
    }
    models = {file.variant.file: file.model for file in files.accepted}
    files_of = {precision: model for precision in files.precisions if (model := models.get(f"model.{precision}.ort"))}
    row = task.feeds(test[:1])
    measured = fastest_within_budget(served_models(files_of, files.allowed, profile), row, sizes, profile)
    advice = int8_advice(files_of, row, profile.threads)
    files.progress("measured", 0.9)
    return _Content(package, sizes, {file: str(error) for file, error in left_out.items()}, measured, advice)


def _of_texts(
    trained: Restored, writer: TextWriter, contract: Mapping[str, Any], profile: ServingProfile, cache: Path,
    progress: Progress,
) -> _Content:  # fmt: skip
    task, declared = trained.task, trained.task.material.declaration
    allowed = allowed_precisions(writer.settings.precisions, profile)
    loaded = Contract.loads(json.dumps(contract).encode(), "contract")
    files = TextFiles(writer, ModelOrigin(
        name=declared.name, contract=loaded, service=declared.student.name, model=trained.id,
        training_set=task.material.training_set, task=declared.kind,
    ), partial(_figures, trained, cache), declared.gates or ())  # fmt: skip
    files.accept(progress)
    package = files.package()
    written = [str(name) for name in writer.settings.precisions if name not in files.left_out]
    sizes = {name: package_bytes(package, name) for name in written}
    served = served_models({name: files.content[f"{MODEL}.{name}.ort"] for name in sizes}, allowed, profile)
    if not served:
        raise GateFailed(
            "profiles.serving.precision", "; ".join(files.left_out[name] for name in allowed),
            expected=f"a file in {profile.precision}", remedy="serve another precision, or declare a lower agreement",
        )  # fmt: skip
    measured = fastest_within_budget(served, task.feeds(task.material.parts.test[:1]), sizes, profile)
    progress("measured", 0.95)
    return _Content(package, sizes, files.left_out, measured)


def _figures(trained: Restored, cache: Path, run: Run) -> Mapping[str, float]:
    task = trained.task
    teacher, _ = complete_outputs(task, task.teacher(), np.arange(task.material.table.num_rows), cache, silent)
    return task.figures(run, trained.student, teacher)


def _restored(material: Material, model_folder: Path) -> Restored:
    trained = restore(material, model_folder)
    if trained.contract != material.contract:
        raise ContractMismatch(
            str(model_folder),
            f"trained under contract {trained.contract[:12]}",
            expected=material.contract[:12],
            remedy="run training-set and distill again",
        )
    if not same_training(json.loads((model_folder / REPORT).read_bytes())["made_of"], trained.task, "report"):
        raise ContractMismatch(
            str(model_folder),
            "its metrics were measured with an earlier version of the task's code",
            expected="metrics of the current code",
            remedy="run `isthmus distill`: it measures again without training",
        )
    return trained


class _Files:
    def __init__(self, trained: Restored, cache: Path, profile: ServingProfile, progress: Progress) -> None:
        self.trained, self.profile, self.progress = trained, profile, progress
        self.precisions = exported_precisions(trained.task.tolerance, profile)
        self.allowed = allowed_precisions(self.precisions, profile)
        progress("read", 0.1)
        self.accepted: list[Accepted] = []
        self.left_out: dict[str, GateFailed] = {}
        self.core: tuple[TensorInfo, ...] = ()
        self.head: bytes | None = None
        task, student = trained.task, trained.student
        golden, graph = task.cases(student), student_graph(task, student)
        self._model = partial(in_precision, task, graph, edges=task.edges(student))
        self.models: dict[str, bytes] = {}
        self._convert("fp32")
        progress("converted", 0.3)
        test, everything = task.material.parts.test, np.arange(task.material.table.num_rows)
        teacher, _ = complete_outputs(task, task.teacher(), everything, cache, silent)
        self.reference = StudentReference(task, test, teacher.float32(test), golden, sample_cases(task, student, test))
        self.limits = ParityLimits.of(task, student, test)
        tensors = onnx.load_model_from_string(self.models["model.fp32.onnx"]).graph
        self.inputs, self.outputs = (tuple(map(tensor_info, values)) for values in (tensors.input, tensors.output))
        self.extra = task.shipped(teacher)

    def _convert(self, precision: str) -> None:
        model = self._model(precision)
        self.models |= {f"model.{precision}.onnx": model, f"model.{precision}.ort": in_ort_format(model, precision)}

    def accept_models(self) -> None:
        limits = self.reference.task.max_sizes
        named = {size for tensor in self.inputs for size in tensor.shape if isinstance(size, str)}
        max_sizes = {size: largest for size, largest in limits.items() if size in named}
        for precision in self.precisions:
            passed: list[Accepted] = []
            try:
                self._require_needed(precision, "onnx")
                if precision != "fp32":
                    self._convert(precision)
                require_smaller(precision, self.models, self.profile)
                for file, model in self.models.items():
                    if file.split(".")[1] == precision:
                        run = Candidate(model, self.profile.threads).run
                        passed.append(accept(self.reference, self.limits, file, model, run, max_sizes))
            except GateFailed as error:
                # All other files derive from the fp32 graph or the student, so a wrong fp32 file stops the export.
                wrong = precision == "fp32" and isinstance(error, ParityFailed)
                if wrong or precision == self.profile.precision:
                    raise
                self.left_out[precision] = error
                self.progress(f"no {precision}: {error}", 0.3 + 0.1 * len(self.accepted))
            else:
                self.accepted += passed
                self.progress(f"compared {precision}", 0.3 + 0.1 * len(self.accepted))
        if not self.accepted:
            raise next(iter(self.left_out.values()))

    def _require_needed(self, precision: str, suffix: str) -> None:
        variants = [file.variant for file in self.accepted if file.variant.precision != "fp32"]
        smaller = [variant.precision for variant in variants if variant.format == suffix.removesuffix(".zip")]
        if self.profile.precision == SMALLEST and precision in OPTIONAL and smaller:
            raise GateFailed(f"{MODEL}.{precision}", f"not needed: {smaller[0]} passes and comes first")

    def accept_programs(self) -> None:
        task, train = self.trained.task, self.trained.task.material.parts.train
        runtimes = conversions_for(task.material.declaration)
        if not runtimes:
            return
        of = portable_part(task, self.trained.student, self.reference.rows[:1], self.inputs, self.outputs)
        if of.part == CORE:
            self.core = tuple(of.tensors)
            self.head = self._head(of)
        for runtime in runtimes:
            made = runtime.files(of, train, self.precisions)
            whole = b""
            for file, convert in made.items():
                if file in self.left_out:
                    continue
                _, precision, suffix = file.split(".", 2)
                try:
                    self._require_needed(precision, suffix)
                    program = convert()
                    if precision in OPTIONAL:
                        require_fewer_bytes(file, program.model, whole)
                    with run_program(runtime.program, program, of.tensors, of.outputs) as run:
                        accepted = accept(self.reference, self.limits, file, program.model, run, program.max_sizes)
                    if precision == "fp32":
                        whole = program.model
                    variant = msgspec.structs.replace(accepted.variant, padded=program.padded)
                    self.accepted.append(accepted._replace(variant=variant))
                    self.progress(f"compared {file}", 0.8)
                except GateFailed as error:
                    # Other files are made from the same program, or in the same way, so they would be wrong, too.
                    wrong = [each for each in made if each == file or (precision == "fp32" and (
                        isinstance(error, ParityFailed) or each.split(".")[1] in OPTIONAL
                    ))]  # fmt: skip
                    self.left_out |= dict.fromkeys(wrong, error)
                    self.progress(f"no {', '.join(wrong)}: {error}", 0.8)

    def _head(self, core: Portable) -> bytes | None:
        if core.head is None:
            return None
        try:
            return core.head()
        except GateFailed as error:
            self.left_out[HEAD] = error
            self.progress(f"no {HEAD}: {error}", 0.5)
            return None

    def _classes(self) -> tuple[str, ...]:
        names = tuple(self.trained.task.classes or ())
        fit = [tensor.shape[-1:] for tensor in self.outputs] == [(len(names),)] and len({*names}) == len(names)
        return names if fit and all(name.isprintable() and len(name) <= LONGEST for name in names) else ()

    def package(self, contract: Mapping[str, Any], device: DeviceManifest | None) -> dict[str, bytes]:
        material = self.trained.task.material
        declaration = material.declaration
        core = self.core if any(file.variant.core for file in self.accepted) else ()
        head = self.head if core else None
        has_rows = bool(self.reference.golden[0].rows)
        row_inputs = self.trained.task.row_inputs if has_rows else ()
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            name=declaration.name,
            contract=material.contract,
            service=declaration.student.name,
            model=self.trained.id,
            training_set=material.training_set,
            task=declaration.kind,
            metric=self.trained.task.metric,
            inputs=tensor_positions(row_inputs),
            tensors=self.inputs,
            outputs=self.outputs,
            variants=tuple(file.variant for file in self.accepted),
            files={name: purpose for name, (_, purpose) in self.extra.items()}
            | ({} if device is None else CLIENTS)
            | ({HEAD: "the steps from raw values to the tensors of the numeric core", **READERS} if head else {}),
            device=device,
            core=core,
            classes=(classes := self._classes()),
            several=bool(classes) and declaration.label == SEVERAL,
            rounding=self.trained.task.rounding,
        )
        tests = xctest(manifest)
        purposes = dict.fromkeys(tests, "a test for Xcode, in which Core ML computes the golden cases")
        manifest = msgspec.structs.replace(manifest, files={**manifest.files, **purposes})
        cases = tuple(
            GoldenCase(
                _encoded(case.feeds),
                {file.variant.file: _encoded(file.outputs[place]) for file in self.accepted},
                tuple(case.rows),
                _encoded({tensor.name: case.core[tensor.name] for tensor in core}),
            )
            for place, case in enumerate(self.reference.golden)
        )
        files = {file.variant.file: file.model for file in self.accepted}
        files |= {name: content for name, (content, _) in self.extra.items()}
        if device is not None:
            files |= sources(CLIENTS)
        if head:
            files |= {HEAD: head, **sources(READERS)}
        files |= {name: text.encode() for name, text in tests.items()}
        golden = Golden(tuple(dict.fromkeys(item.name for item in row_inputs)), cases)
        return contents(manifest, contract, golden, files)


def _encoded(tensors: Mapping[str, Array]) -> dict[str, TensorBytes]:
    return {name: TensorBytes.of(array) for name, array in tensors.items()}
