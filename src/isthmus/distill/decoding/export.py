"""A causal language model becomes a package: graphs in three precisions, the tokenizer, and golden prompts."""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import onnx

from isthmus.distill.decoding import program
from isthmus.distill.decoding.network import Decoder as Network
from isthmus.distill.decoding.reference import Compared, FileReport, Reference, golden_cases
from isthmus.distill.decoding.settings import TOLERANCES, DecodingSettings, Origin
from isthmus.distill.decoding.tokenizer import generation_of
from isthmus.distill.decoding.weights import Precision, in_precision
from isthmus.distill.executorch.process import LIBRARIES
from isthmus.distill.export.package import contents, write_package
from isthmus.distill.onnx.runtime import described, ort_format
from isthmus.distill.portable.libraries import require_installed
from isthmus.features.clients import GENERATORS, sources
from isthmus.features.decoding.generation import PAST, TOKENS, Generation, GoldenPrompt, prompt_features
from isthmus.features.decoding.tokenizer import Tokenizer
from isthmus.features.errors import ConfigurationError, GateFailed, Problem, one_of
from isthmus.features.package.manifest import (
    FORMAT_VERSION,
    MODEL,
    ROUNDING,
    Format,
    Manifest,
    Tensor,
    Variant,
    package_digest,
)
from isthmus.features.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

SUMS = 10
"""By how much more than in a small network two processors may differ: sums have hundreds of products."""


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

    A precision that differs too much from the model is left out. Without fp32, where that was asked for, nothing is
    written.

    Raises:
        ConfigurationError: model or tokenizer cannot be converted, or are not of each other.
        GateFailed: a model file differs too much from the model.
        RequestError: a golden prompt does not fit.
    """
    started = time.perf_counter()
    if settings.executorch:
        require_installed("decoding", [LIBRARIES])
    network = Network(model.float().eval(), settings.context)
    end = settings.end or _ends(model)
    generation, opened = generation_of(
        tokenizer, context=network.context, most=settings.most, end=end, template=settings.template
    )
    _require_own(model, generation, opened)
    _require_features(generation, origin)
    reference = Reference.of(model, network, generation, opened, settings)
    progress("read", 0.1)
    files = _Files(reference, settings)
    for place, precision in enumerate(settings.precisions):
        files.add(precision, in_precision(network, precision))
        progress(f"compared {precision}", 0.1 + 0.8 * (place + 1) / len(settings.precisions))
    if settings.executorch:
        files.add_program(network)
        progress("compared ExecuTorch", 0.95)
    if not files.accepted:
        raise GateFailed("decoding", "no file is near enough to the model", remedy="ask for fp32, too")
    shipped = {**files.content, **sources(GENERATORS), generation.tokenizer: tokenizer}
    shipped[generation.prompts] = msgspec.json.encode(files.prompts())
    golden = golden_cases(reference, files.accepted)
    contract = json.loads(origin.contract.dumps())
    package = contents(files.manifest(origin, generation), contract, golden, shipped)
    path = write_package(packages, origin.name, package)
    progress(f"package {path.name}", 1.0)
    reports = {file: compared.report for file, compared in files.accepted.items()}
    return DecodingReport(path, package_digest(path), reports, files.left_out, round(time.perf_counter() - started, 3))


class _Files:
    """The model files that are near enough to the model, and why others are not there."""

    def __init__(self, reference: Reference, settings: DecodingSettings) -> None:
        self._reference, self._settings = reference, settings
        self.accepted: dict[str, Compared] = {}
        self.content: dict[str, bytes] = {}
        self.left_out: dict[str, str] = {}
        self._kinds: dict[str, tuple[Precision, Format]] = {}
        self._tensors: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = ((), ())

    def add(self, precision: Precision, model: bytes) -> None:
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
        except GateFailed as error:
            if precision == "fp32":
                raise
            self.left_out[precision] = str(error)
            return
        self.accepted |= compared
        self.content |= {file: made[form] for file, form in names.items()}
        self._kinds |= {file: (precision, form) for file, form in names.items()}

    def add_program(self, network: Network) -> None:
        """The file for ExecuTorch; left out where that cannot have it."""
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

    def prompts(self) -> list[GoldenPrompt]:
        """The golden prompts with the answers of each file."""
        return [
            msgspec.structs.replace(
                prompt, answers={file: tuple(compared.answers[place]) for file, compared in self.accepted.items()}
            )
            for place, prompt in enumerate(self._reference.prompts)
        ]

    def manifest(self, origin: Origin, generation: Generation) -> Manifest:
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


def _ends(model: "LlamaForCausalLM") -> tuple[int, ...]:
    end: Any = model.config.eos_token_id
    return () if end is None else (end,) if isinstance(end, int) else tuple(end)


def _require_features(generation: Generation, origin: Origin) -> None:
    """Refuses a template that names what is no feature of the service."""
    known = prompt_features(origin.contract, origin.service)
    problems = [
        Problem("template", f"names {name}", f"{{prompt}} or a feature of {origin.service}: {one_of(known)}")
        for name in generation.features
        if name not in known
    ]
    if problems:
        raise ConfigurationError("decoding", problems)


def _require_own(model: "LlamaForCausalLM", generation: Generation, tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that is not the model's, as far as that shows."""
    config: Any = model.config
    problems = []
    if tokenizer.size > config.vocab_size:
        problems.append(
            Problem("tokenizer", f"has {tokenizer.size:,} tokens", f"at most the model's {config.vocab_size:,}")
        )
    control = {each.token for each in generation.control}
    problems += [
        Problem("tokenizer", f"has no control token {token}, with which the model ends or begins texts",
                "the tokenizer that the model was trained with")
        for token in dict.fromkeys((*generation.end, *generation.begin))
        if token not in control
    ]  # fmt: skip
    if problems:
        raise ConfigurationError("decoding", problems)
