"""Export a causal language model: graphs in up to three precisions, the tokenizer, and golden prompts."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import onnx

from isthmus.distill.decoder.reference import FileComparison, FileReport, golden_cases
from isthmus.distill.decoder.weights import in_precision
from isthmus.distill.decoder.writer import TextWriter
from isthmus.distill.export.acceptance import require_gates
from isthmus.distill.export.package import contents, write_package
from isthmus.distill.gates import Gate
from isthmus.distill.language.decoding import TOLERANCES, DecodingSettings, Precision
from isthmus.distill.onnx.runtime import Run, ask, ort_format, session, tensor_info
from isthmus.distill.runtimes.executorch.export import DECODER, converted_decoder
from isthmus.distill.runtimes.executorch.process import ExecuTorchProgram
from isthmus.distill.runtimes.libraries import require_installed
from isthmus.distill.runtimes.network import run_program
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
"""Factor by which processors may differ more than for a small network: sums have hundreds of products."""


@dataclass(frozen=True, kw_only=True)
class ModelOrigin:
    """The origin of a model, as the manifest records it.

    Attributes:
        service: feature service whose features the prompt template may name.
        model: id of the student.
        task: name of its task class.
    """

    name: str
    contract: Contract
    service: str
    model: str
    training_set: str
    task: str = "causal"


@dataclass(frozen=True)
class DecodingReport:
    """The result of an export; `left_out` maps each missing precision or file to the reason."""

    path: Path
    digest: str
    files: dict[str, FileReport]
    left_out: dict[str, str]
    seconds: float


def export(
    model: "LlamaForCausalLM",
    tokenizer: bytes,
    packages: Path,
    *,
    origin: ModelOrigin,
    settings: DecodingSettings,
    progress: Progress = silent,
) -> DecodingReport:
    """Write the package of a language model to `packages/<name>-<digest>`, to generate text on servers and devices.

    The same model gives the same bytes. Converts `model` to float32 in place and switches it to eval mode. Leaves out
    int8, int4 or ExecuTorch files that differ too much from the model. Writes nothing if one of the errors below is
    raised.

    Args:
        model: language model.
        tokenizer: content of its `tokenizer.json`.
        packages: folder for packages.
        origin: name of the package, and the contract, student and training set from which the model comes.
        settings: precisions, golden prompts and limits.
        progress: called with a line of text and the finished share, 0 to 1.

    Raises:
        ConfigurationError: model, tokenizer or settings cannot be exported or do not match, or ExecuTorch is requested
            but not installed.
        GateFailed: the fp32 file of ONNX Runtime, or every file, differs too much from the model.
        RequestError: a golden prompt cannot be encoded.
    """
    started = time.perf_counter()
    if settings.executorch:
        require_installed("decoding", [ExecuTorchProgram.libraries])
    files = TextFiles(TextWriter.of(model.float(), tokenizer, settings), origin)
    files.accept(progress)
    path = write_package(packages, origin.name, files.package())
    progress(f"package {path.name}", 1.0)
    reports = {file: compared.report for file, compared in files.accepted.items()}
    return DecodingReport(path, package_digest(path), reports, files.left_out, round(time.perf_counter() - started, 3))


class TextFiles:
    """The files of a language model's package: converts the model, and keeps the files that agree with it.

    Call `accept` before `package`. `left_out` has the reason for each other file. `figures` measures a loaded file for
    the `gates`, in precisions below fp32. Raises a ConfigurationError if the prompt template names something that is
    not a feature of the service.
    """

    def __init__(
        self, writer: TextWriter, origin: ModelOrigin, figures: Callable[[Run], Mapping[str, float]] | None = None,
        gates: Sequence[Gate] = (),
    ) -> None:  # fmt: skip
        self._writer, self._origin, self._settings = writer, origin, writer.settings
        self._figures, self._gates = figures, gates
        if problems := unknown_features(writer.generation.template, origin.contract, origin.service):
            raise ConfigurationError("decoding", problems)
        self._reference = writer.reference
        self.accepted: dict[str, FileComparison] = {}
        self.content: dict[str, bytes] = {}
        self.left_out: dict[str, str] = {}
        self._kinds: dict[str, tuple[Precision, Format]] = {}
        self._tensors: tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]] = ((), ())

    def accept(self, progress: Progress = silent) -> None:
        precisions = self._settings.precisions
        progress("read", 0.1)
        for place, precision in enumerate(precisions):
            self._add(precision, in_precision(self._writer.network, precision))
            progress(f"compared {precision}", 0.1 + 0.7 * (place + 1) / len(precisions))
        if self._settings.executorch:
            self._add_program()
            progress("compared ExecuTorch", 0.85)
        if not self.accepted:
            raise GateFailed("decoding", "no file is close enough to the model", remedy="add fp32 to the precisions")

    def package(self) -> dict[str, bytes]:
        generation = self._writer.generation
        shipped = {**self.content, **sources(GENERATORS), generation.tokenizer: self._writer.file}
        shipped[generation.prompts] = msgspec.json.encode(self._prompts())
        contract = json.loads(self._origin.contract.dumps())
        return contents(self._manifest(), contract, golden_cases(self._reference, self.accepted), shipped)

    def _add(self, precision: Precision, model: bytes) -> None:
        graph = onnx.load_model_from_string(model).graph
        self._tensors = tuple(map(tensor_info, graph.input)), tuple(map(tensor_info, graph.output))
        made = {form: model if form == "onnx" else ort_format(model) for form in self._settings.formats}
        names = {f"{MODEL}.{precision}.{form}": form for form in made}
        try:
            compared = {
                file: self._reference.compare(file, precision, made[form], self._settings)
                for file, form in names.items()
            }
            if self._figures is not None and self._gates and precision != "fp32":
                opened = session(model, self._settings.threads)
                figures = self._figures(lambda feeds: ask(opened, feeds))
                require_gates(next(iter(names)), figures, self._gates)
        except GateFailed as error:
            if precision == "fp32":
                raise
            self.left_out[precision] = str(error)
            return
        self.accepted |= compared
        self.content |= {file: made[form] for file, form in names.items()}
        self._kinds |= {file: (precision, form) for file, form in names.items()}

    def _add_program(self) -> None:
        try:
            made = converted_decoder(self._writer.network)
            with run_program(ExecuTorchProgram, made, *self._tensors) as run:
                compared = self._reference.compare_run(
                    DECODER, "fp32", run, len(made.model), self._settings, max_tokens_per_call=1
                )
        except GateFailed as error:
            self.left_out[DECODER] = str(error)
            return
        self.accepted[DECODER], self.content[DECODER] = compared, made.model
        self._kinds[DECODER] = "fp32", "pte"

    def _prompts(self) -> list[GoldenPrompt]:
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
