"""A causal language model becomes a package: graphs in three precisions, the tokenizer, and golden prompts."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import onnx

from isthmus.distill.declaration import Gate
from isthmus.distill.decoder.reference import Compared, FileReport, golden_cases
from isthmus.distill.decoder.weights import in_precision
from isthmus.distill.decoder.writer import Writer
from isthmus.distill.export.acceptance import require_gates
from isthmus.distill.export.package import contents, write_package
from isthmus.distill.language.decoding import TOLERANCES, DecodingSettings, Precision
from isthmus.distill.onnx.runtime import Run, ask, described, ort_format, session
from isthmus.distill.runtimes.executorch import decoder as program
from isthmus.distill.runtimes.executorch.process import LIBRARIES
from isthmus.distill.runtimes.libraries import require_installed
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ConfigurationError, GateFailed
from isthmus.features.progress import Progress, silent
from isthmus.package.clients import GENERATORS, sources
from isthmus.package.generation.prompt import PAST, TOKENS, GoldenPrompt, unknown_features
from isthmus.package.manifest import (
    FORMAT_VERSION,
    MODEL,
    ROUNDING,
    Format,
    Manifest,
    TensorInfo,
    Variant,
    package_digest,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

SUMS = 10
"""By how much more than in a small network two processors may differ: sums have hundreds of products."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model comes from, as a manifest says it.

    Attributes:
        name: of the package.
        contract: that of the features.
        service: the feature service whose features the template may name.
        model: id of the student.
        training_set: id of what it learned from.
        task: the class that made it.
    """

    name: str
    contract: Contract
    service: str
    model: str
    training_set: str
    task: str = "causal"


@dataclass(frozen=True)
class DecodingReport:
    """The result of an export; `left_out` says why a file is not there."""

    path: Path
    digest: str
    files: dict[str, FileReport]
    left_out: dict[str, str]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return dict(msgspec.to_builtins(self, enc_hook=str))


def export(
    model: "LlamaForCausalLM",
    tokenizer: bytes,
    packages: Path,
    *,
    origin: Origin,
    settings: DecodingSettings,
    progress: Progress = silent,
) -> DecodingReport:
    """Writes the package of a model to `packages/<name>-<digest>`. The same model gives the same bytes.

    `isthmus export` does it for the student of a `Causal`. A precision that differs too much from the model is left
    out. Without fp32, where that was asked for, nothing is written.

    Raises:
        ConfigurationError: model or tokenizer cannot be converted, or are not of each other.
        GateFailed: a model file differs too much from the model.
        RequestError: a golden prompt does not fit.
    """
    started = time.perf_counter()
    if settings.executorch:
        require_installed("decoding", [LIBRARIES])
    files = TextFiles(Writer.of(model.float(), tokenizer, settings), origin)
    files.accept(progress)
    path = write_package(packages, origin.name, files.package())
    progress(f"package {path.name}", 1.0)
    reports = {file: compared.report for file, compared in files.accepted.items()}
    return DecodingReport(path, package_digest(path), reports, files.left_out, round(time.perf_counter() - started, 3))


class TextFiles:
    """The model files that are near enough to a model, and why others are not there.

    Args:
        writer: the model with its tokenizer.
        origin: what the manifest says of it.
        figures: of a run of a model file, for the gates. They are asked of the precisions below fp32.
        gates: those of the declaration.

    Raises:
        ConfigurationError: the template names what is no feature of the service.
    """

    def __init__(
        self, writer: Writer, origin: Origin, figures: Callable[[Run], Mapping[str, float]] | None = None,
        gates: Sequence[Gate] = (),
    ) -> None:  # fmt: skip
        self._writer, self._origin, self._settings = writer, origin, writer.settings
        self._figures, self._gates = figures, gates
        if problems := unknown_features(writer.generation.template, origin.contract, origin.service):
            raise ConfigurationError("decoding", problems)
        self._reference = writer.reference
        self.accepted: dict[str, Compared] = {}
        self.content: dict[str, bytes] = {}
        self.left_out: dict[str, str] = {}
        self._kinds: dict[str, tuple[Precision, Format]] = {}
        self._tensors: tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]] = ((), ())

    def accept(self, progress: Progress = silent) -> None:
        """All files of the settings; a GateFailed if none is near enough."""
        precisions = self._settings.precisions
        progress("read", 0.1)
        for place, precision in enumerate(precisions):
            self._add(precision, in_precision(self._writer.network, precision))
            progress(f"compared {precision}", 0.1 + 0.7 * (place + 1) / len(precisions))
        if self._settings.executorch:
            self._add_program()
            progress("compared ExecuTorch", 0.85)
        if not self.accepted:
            raise GateFailed("decoding", "no file is near enough to the model", remedy="ask for fp32, too")

    def package(self) -> dict[str, bytes]:
        """The files of the package by name."""
        generation = self._writer.generation
        shipped = {**self.content, **sources(GENERATORS), generation.tokenizer: self._writer.file}
        shipped[generation.prompts] = msgspec.json.encode(self._prompts())
        contract = json.loads(self._origin.contract.dumps())
        return contents(self._manifest(), contract, golden_cases(self._reference, self.accepted), shipped)

    def _add(self, precision: Precision, model: bytes) -> None:
        """The files of a graph, all or none; a GateFailed if it is that in fp32 and differs."""
        graph = onnx.load_model_from_string(model).graph
        self._tensors = tuple(map(described, graph.input)), tuple(map(described, graph.output))
        made = {form: model if form == "onnx" else ort_format(model) for form in self._settings.formats}
        names = {f"{MODEL}.{precision}.{form}": form for form in made}
        try:
            compared = {
                file: self._reference.compare(file, precision, made[form], self._settings)
                for file, form in names.items()
            }
            if self._figures is not None and self._gates and precision != "fp32":
                opened = session(model, self._settings.threads)
                found = self._figures(lambda feeds: ask(opened, feeds))
                require_gates(next(iter(names)), found, self._gates)
        except GateFailed as error:
            if precision == "fp32":
                raise
            self.left_out[precision] = str(error)
            return
        self.accepted |= compared
        self.content |= {file: made[form] for file, form in names.items()}
        self._kinds |= {file: (precision, form) for file, form in names.items()}

    def _add_program(self) -> None:
        """The file for ExecuTorch; left out where that cannot have it."""
        network = self._writer.network
        inputs, outputs = self._tensors
        try:
            content = program.converted(network)
            with program.running(content, network, inputs, outputs) as run:
                compared = self._reference.compare_run(program.FILE, "fp32", run, len(content), self._settings, part=1)
        except GateFailed as error:
            self.left_out[program.FILE] = str(error)
            return
        self.accepted[program.FILE], self.content[program.FILE] = compared, content
        self._kinds[program.FILE] = "fp32", "pte"

    def _prompts(self) -> list[GoldenPrompt]:
        """The golden prompts with the answers of each file."""
        return [
            msgspec.structs.replace(
                prompt, answers={file: tuple(compared.answers[place]) for file, compared in self.accepted.items()}
            )
            for place, prompt in enumerate(self._reference.prompts)
        ]

    def _manifest(self) -> Manifest:
        origin, generation = self._origin, self._writer.generation
        inputs, outputs = self._tensors
        largest = max(compared.largest for compared in self.accepted.values())
        return Manifest(
            format_version=FORMAT_VERSION,
            name=origin.name,
            contract=origin.contract.hash,
            service=origin.service,
            model=origin.model,
            training_set=origin.training_set,
            task=origin.task,
            metric="agreement",
            inputs=(),
            tensors=inputs,
            outputs=outputs,
            variants=tuple(self._variant(file, generation.context) for file in self.accepted),
            files={
                generation.tokenizer: "the tokenizer, as the library tokenizers writes it",
                generation.prompts: "golden prompts, their tokens and their continuations",
                **GENERATORS,
            },
            rounding=SUMS * ROUNDING * max(1.0, largest),
            generation=generation,
        )

    def _variant(self, file: str, context: int) -> Variant:
        (precision, form), compared, content = self._kinds[file], self.accepted[file], self.content[file]
        return Variant(
            file=file,
            precision=precision,
            format=form,
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            tolerance=TOLERANCES[precision] * self._reference.scale,
            worst=compared.worst,
            quality={"agreement": compared.agreement},
            most={TOKENS: 1 if form == "pte" else context, PAST: context},
        )
