"""A model file beside the model in torch: its logits, its tokens, its speed."""

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
from isthmus.package.generation.decoder import PART, Decoder, Read
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS, Generation, GoldenPrompt
from isthmus.package.generation.tokenizer import Tokenizer
from isthmus.package.golden import Golden, GoldenCase, TensorBytes
from isthmus.package.replay import deviation

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CLOSE = 1e-3
"""The lead of a token, as a share of the largest logit, below which another processor may prefer the next one."""
GOLDEN_TOKENS = 16
"""Of a golden prompt in a golden case of tensors: the cache has thousands of numbers for each."""


@dataclass(frozen=True)
class FileReport:
    """A model file: its size, the largest difference of a logit, and how many tokens agree.

    `prefill` and `decode` are tokens per second: of a prompt of 64 tokens, and of the steps behind it.
    """

    bytes: int
    worst: float
    agreement: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class Compared:
    """What a model file answers, beside the model.

    Attributes:
        report: for people.
        worst: largest difference of a logit.
        agreement: share of equal tokens.
        largest: the largest number of the golden outputs, by absolute value.
        answers: of each golden prompt, the greedy tokens before the first close decision.
        outputs: of each golden case.
    """

    report: FileReport
    worst: float
    agreement: float
    largest: float
    answers: list[list[int]]
    outputs: list[dict[str, Array]]


@dataclass(frozen=True, eq=False)
class Reference:
    """What model files are compared with: greedy texts behind golden prompts, and what is fed on the way.

    Attributes:
        prompts: without answers.
        said: what the model says behind each, token by token.
        cases: what a model file is fed in the golden cases of tensors: a prompt, and a step behind it.
        scale: the largest logit, by absolute value.
        decoder: without an owner.
        run: the model in torch, with the inputs and outputs of its graph.
    """

    prompts: list[GoldenPrompt]
    said: list[list[Read]]
    cases: list[dict[str, Array]]
    scale: float
    decoder: Decoder
    run: Run

    @classmethod
    def of(
        cls, model: "LlamaForCausalLM", network: CachedModel, generation: Generation, tokenizer: Tokenizer,
        settings: DecodingSettings,
    ) -> "Reference":  # fmt: skip
        """That of a model; a GateFailed if the module with a cache is not what the model is."""
        shape = network.cache
        decoder = Decoder("the model in torch", generation, "", shape)

        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            # On one thread: on two the sums are others in their last bits, and so would be the bytes of a package.
            with torch.inference_mode(), threads(1):
                logits, new = network(torch.from_numpy(feeds[TOKENS]), torch.from_numpy(feeds[PAST]))
            return {LOGITS: logits.numpy(), NEW: new.numpy()}

        prompts, said = [], []
        for text in settings.prompts:
            tokens = tokenizer.encode(generation.parts(text, settings.features))
            prompts.append(GoldenPrompt(text, dict(settings.features), tuple(tokens), {}))
            said.append([*decoder.greedy(run, tokens, settings.golden_tokens)])
        with torch.inference_mode():
            whole = model(torch.tensor([prompts[0].tokens])).logits[0, -1].numpy()
        scale = float(max(np.abs(read.logits).max() for reads in said for read in reads))
        if (apart := float(np.abs(whole - said[0][0].logits).max())) > TOLERANCES["fp32"] * scale:
            raise GateFailed("decoding", f"the module with a cache differs from the model by {apart:.3g}",
                             expected=f"{TOLERANCES['fp32'] * scale:.3g} at most", remedy="report this")  # fmt: skip
        short = [*prompts[0].tokens[:GOLDEN_TOKENS]]
        empty = np.zeros((1, 0, *shape), np.float32)
        prefill: dict[str, Array] = {TOKENS: np.array([short], np.int64), PAST: empty}
        step: dict[str, Array] = {TOKENS: np.array([[said[0][0].token]], np.int64), PAST: run(prefill)[NEW]}
        if settings.executorch:
            # It takes one token at a time.
            prefill[TOKENS] = prefill[TOKENS][:, :1]
        return cls(prompts, said, [prefill, step], scale, decoder, run)

    @property
    def sure(self) -> list[list[int]]:
        """What the model says behind each prompt, up to a token that another processor might not prefer."""
        return [[*_sure(said)] for said in self.said]

    def compare(self, file: str, precision: Precision, content: bytes, settings: DecodingSettings) -> Compared:
        """A model file of ONNX Runtime beside the model; a GateFailed if it is too far."""
        opened = session(content, settings.threads)
        return self.compare_run(file, precision, lambda feeds: ask(opened, feeds), len(content), settings)

    def compare_run(
        self, file: str, precision: Precision, run: Run, size: int, settings: DecodingSettings, part: int = PART
    ) -> Compared:
        """The same of a file that runs already, and takes so many tokens at once."""
        decoder = replace(self.decoder, part=part)
        tolerance = TOLERANCES[precision] * self.scale
        apart, equal, count, answers = [], 0, 0, []
        for prompt, said in zip(self.prompts, self.said, strict=True):
            cache = decoder.cache(len(prompt.tokens) + len(said))
            fed: Sequence[int] = prompt.tokens
            for read in said:
                own = decoder.read(run, fed, cache)
                place = f"token {count} behind the golden prompts".format
                apart.append(deviation(LOGITS, read.logits, own.logits, tolerance, widths=True, row_name=place))
                equal, count, fed = equal + (own.token == read.token), count + 1, [read.token]
            answers.append([*_sure(decoder.greedy(run, prompt.tokens, settings.golden_tokens))])
        agreement, far = equal / count, max(apart, key=lambda each: each.by)
        outputs = [run(case) for case in self.cases]
        if far.by > tolerance:
            raise GateFailed(f"{file}: {far.place}", far.says("the model in torch"),
                             expected=f"at most {tolerance:.3g}", remedy="leave this precision out")  # fmt: skip
        if agreement < (least := {**AGREEMENT, **settings.agreement}[precision]):
            raise GateFailed(file, f"says {agreement:.1%} of the tokens that the model says", expected=f"{least:.1%}",
                             remedy="leave this precision out, or declare what agreement is enough")  # fmt: skip
        largest = float(max(np.abs(array).max() for output in outputs for array in output.values()))
        report = FileReport(size, far.by, agreement, *_speed(run, decoder, self.prompts[0].tokens))
        return Compared(report, far.by, agreement, largest, answers, outputs)


def golden_cases(reference: Reference, accepted: Mapping[str, Compared]) -> Golden:
    """The golden cases of tensors."""
    return Golden((), tuple(
        GoldenCase(
            {name: TensorBytes.of(array) for name, array in case.items()},
            {file: {name: TensorBytes.of(array) for name, array in compared.outputs[place].items()}
             for file, compared in accepted.items()},
        )
        for place, case in enumerate(reference.cases)
    ))  # fmt: skip


def _sure(said: Iterable[Read]) -> Iterator[int]:
    """Tokens up to the first one that another processor might not prefer."""
    for read in said:
        if read.lead < CLOSE * np.abs(read.logits).max():
            return
        yield read.token


def _speed(run: Run, decoder: Decoder, tokens: Sequence[int], prompt: int = 64, steps: int = 16) -> tuple[float, float]:
    """Tokens per second of a prompt and of steps, each the best of three."""
    prompt = min(prompt, decoder.generation.context // 2)
    steps = min(steps, decoder.generation.context - prompt - 1)
    fed = [*np.resize(np.array(tokens), prompt).tolist()]
    prefill, decode = [], []
    for _ in range(3):
        cache = decoder.cache(prompt + steps)
        began = time.perf_counter()
        said = decoder.read(run, fed, cache)
        read = time.perf_counter()
        for _ in range(steps):
            said = decoder.read(run, [said.token], cache)
        prefill.append(prompt / (read - began))
        decode.append(steps / (time.perf_counter() - read))
    return max(prefill), max(decode)
