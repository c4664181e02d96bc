"""Compare a model file with the model in torch: logits, tokens and speed."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from isthmus.distill.accelerator import threads
from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.language.decoding import AGREEMENT, TOLERANCES, DecodingSettings, Precision
from isthmus.distill.onnx.runtime import Run, ask, session
from isthmus.distill.types import Array
from isthmus.features.errors import GateFailed
from isthmus.package.generation.decoder import PART, Decoder, StepOutput
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS, Generation, GoldenPrompt
from isthmus.package.generation.tokenizer import Tokenizer
from isthmus.package.golden import Golden, GoldenCase, TensorBytes
from isthmus.package.replay import deviation

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CLOSE = 1e-3
"""A decision is close if the best token leads by less than this share of the largest logit: processors may differ."""
GOLDEN_TOKENS = 16
"""Tokens of a golden prompt in a golden tensor case: each adds thousands of numbers to the cache."""


@dataclass(frozen=True)
class FileReport:
    """The comparison of a model file with the model in torch: largest logit difference, and share of equal tokens.

    `prefill` and `decode` are tokens per second, for a prompt of at most 64 tokens and for the decoding steps after it.
    """

    bytes: int
    worst: float
    agreement: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class FileComparison:
    """The report of a model file, its tokens after each golden prompt (`answers`), and its outputs of the golden cases.

    An answer ends before the first close decision (`CLOSE`). `largest` is the largest absolute number in `outputs`.
    """

    report: FileReport
    worst: float
    agreement: float
    largest: float
    answers: list[list[int]]
    outputs: list[dict[str, Array]]


@dataclass(frozen=True, eq=False)
class DecoderReference:
    """The answers of the model in torch, which model files must match: tokens and logits after each golden prompt.

    `cases` are the inputs of the golden tensor cases: a prompt, and one decoding step after it. `scale` is the largest
    absolute logit. `run` computes the model in torch, with the inputs and outputs of its graph.
    """

    prompts: list[GoldenPrompt]
    reads: list[list[StepOutput]]
    cases: list[dict[str, Array]]
    scale: float
    decoder: Decoder
    run: Run

    @classmethod
    def of(
        cls, model: "LlamaForCausalLM", network: CachedModel, generation: Generation, tokenizer: Tokenizer,
        settings: DecodingSettings,
    ) -> "DecoderReference":  # fmt: skip
        """Run a language model in torch on the golden prompts, and record the results that its model files must match.

        The results are the tokens that the model chooses and their logits. The golden prompts are the texts in
        `settings.prompts`. `network` computes the same as `model`, with a cache. Raises a GateFailed if the logits of
        the two differ too much after the first prompt.
        """
        shape = network.cache
        decoder = Decoder("the model in torch", generation, "", shape)

        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            # One thread: with two, sums differ in their last bits, and so would the bytes of a package.
            with torch.inference_mode(), threads(1):
                logits, new = network(torch.from_numpy(feeds[TOKENS]), torch.from_numpy(feeds[PAST]))
            return {LOGITS: logits.numpy(), NEW: new.numpy()}

        prompts, reads = [], []
        for text in settings.prompts:
            tokens = tokenizer.encode(generation.parts(text, settings.features))
            prompts.append(GoldenPrompt(text, dict(settings.features), tuple(tokens), {}))
            reads.append([*decoder.greedy(run, tokens, settings.golden_tokens)])
        with torch.inference_mode():
            whole = model(torch.tensor([prompts[0].tokens])).logits[0, -1].numpy()
        scale = float(max(np.abs(read.logits).max() for answer in reads for read in answer))
        if (difference := float(np.abs(whole - reads[0][0].logits).max())) > TOLERANCES["fp32"] * scale:
            raise GateFailed("decoding", f"the module with a cache differs from the model by {difference:.3g}",
                             expected=f"at most {TOLERANCES['fp32'] * scale:.3g}", remedy="report the bug")  # fmt: skip
        short = [*prompts[0].tokens[:GOLDEN_TOKENS]]
        empty = np.zeros((1, 0, *shape), np.float32)
        prefill: dict[str, Array] = {TOKENS: np.array([short], np.int64), PAST: empty}
        step: dict[str, Array] = {TOKENS: np.array([[reads[0][0].token]], np.int64), PAST: run(prefill)[NEW]}
        if settings.executorch:
            # ExecuTorch reads one token at a time.
            prefill[TOKENS] = prefill[TOKENS][:, :1]
        return cls(prompts, reads, [prefill, step], scale, decoder, run)

    @property
    def certain_tokens(self) -> list[list[int]]:
        return [[*_sure(reads)] for reads in self.reads]

    def compare(self, file: str, precision: Precision, content: bytes, settings: DecodingSettings) -> FileComparison:
        opened = session(content, settings.threads)
        return self.compare_run(file, precision, lambda feeds: ask(opened, feeds), len(content), settings)

    def compare_run(
        self,
        file: str,
        precision: Precision,
        run: Run,
        size: int,
        settings: DecodingSettings,
        max_tokens_per_call: int = PART,
    ) -> FileComparison:
        """Compare a model file with the model in torch on the golden prompts, and measure its speed, before export.

        Args:
            file: name of the file, for messages.
            precision: "fp32", "int8" or "int4"; decides how large differences may be.
            run: maps inputs to outputs by running the file.
            size: bytes of the file, for the report.
            settings: declared settings; `agreement` has the least share of equal tokens per precision.
            max_tokens_per_call: maximum number of tokens per call of the file.

        Raises:
            GateFailed: the logits differ too much, or too few tokens are equal.
        """
        decoder = replace(self.decoder, part=max_tokens_per_call)
        tolerance = TOLERANCES[precision] * self.scale
        deviations, equal, count, answers = [], 0, 0, []
        for prompt, reads in zip(self.prompts, self.reads, strict=True):
            cache = decoder.cache(len(prompt.tokens) + len(reads))
            fed: Sequence[int] = prompt.tokens
            for read in reads:
                own = decoder.read(run, fed, cache)
                place = f"token {count} after the golden prompts".format
                deviations.append(deviation(LOGITS, read.logits, own.logits, tolerance, widths=True, row_name=place))
                equal, count, fed = equal + (own.token == read.token), count + 1, [read.token]
            answers.append([*_sure(decoder.greedy(run, prompt.tokens, settings.golden_tokens))])
        agreement, largest_deviation = equal / count, max(deviations, key=lambda each: each.by)
        outputs = [run(case) for case in self.cases]
        if largest_deviation.by > tolerance:
            raise GateFailed(f"{file}: {largest_deviation.place}", largest_deviation.message("the model in torch"),
                             expected=f"at most {tolerance:.3g}", remedy="leave this precision out")  # fmt: skip
        if agreement < (least := {**AGREEMENT, **settings.agreement}[precision]):
            raise GateFailed(file, f"agrees with the model on {agreement:.1%} of the tokens",
                             expected=f"at least {least:.1%}",
                             remedy="leave this precision out, or declare a lower agreement")  # fmt: skip
        largest = float(max(np.abs(array).max() for output in outputs for array in output.values()))
        report = FileReport(size, largest_deviation.by, agreement, *_speed(run, decoder, self.prompts[0].tokens))
        return FileComparison(report, largest_deviation.by, agreement, largest, answers, outputs)


def golden_cases(reference: DecoderReference, accepted: Mapping[str, FileComparison]) -> Golden:
    return Golden((), tuple(
        GoldenCase(
            {name: TensorBytes.of(array) for name, array in case.items()},
            {file: {name: TensorBytes.of(array) for name, array in compared.outputs[place].items()}
             for file, compared in accepted.items()},
        )
        for place, case in enumerate(reference.cases)
    ))  # fmt: skip


def _sure(reads: Iterable[StepOutput]) -> Iterator[int]:
    for read in reads:
        if read.lead < CLOSE * np.abs(read.logits).max():
            return
        yield read.token


def _speed(run: Run, decoder: Decoder, tokens: Sequence[int], prompt: int = 64, steps: int = 16) -> tuple[float, float]:
    prompt = min(prompt, decoder.generation.context // 2)
    steps = min(steps, decoder.generation.context - prompt - 1)
    fed = [*np.resize(np.array(tokens), prompt).tolist()]
    prefill, decode = [], []
    for _ in range(3):
        cache = decoder.cache(prompt + steps)
        began = time.perf_counter()
        last = decoder.read(run, fed, cache)
        read = time.perf_counter()
        for _ in range(steps):
            last = decoder.read(run, [last.token], cache)
        prefill.append(prompt / (read - began))
        decode.append(steps / (time.perf_counter() - read))
    return max(prefill), max(decode)
