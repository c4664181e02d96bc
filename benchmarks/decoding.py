"""Compare the tokens per second that `isthmus infra plan` predicts for language models with measurements.

Models of three sizes with random weights are written in three precisions as `isthmus model export` writes them. Each
round measures the probes and then the file; the result is the median of the rounds' ratios. As in a plan, the prompt
has half a context, followed by 64 steps. On one thread times are processor times, as in the probes, because other load
would slow prompts more than steps.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import torch
from result import Comparison, report
from transformers import LlamaConfig, LlamaForCausalLM

from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.decoder.probes import Probes
from isthmus.distill.decoder.weights import in_precision
from isthmus.distill.decoder.work import Sizes
from isthmus.distill.language.decoding import PRECISIONS
from isthmus.distill.onnx.runtime import ask, ort_format
from isthmus.distill.types import Array
from isthmus.package.generation.decoder import Decoder
from isthmus.package.generation.prompt import Generation
from isthmus.package.inputs import Feeds
from isthmus.package.replay import session_options

SIZES: Mapping[str, dict[str, Any]] = {
    "2M": {"vocab_size": 4096, "hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 4,
           "num_attention_heads": 4, "num_key_value_heads": 4},
    "25M": {"vocab_size": 16384, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12,
            "num_attention_heads": 6, "num_key_value_heads": 2},
    "135M": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3},
}  # fmt: skip
HALF, NEAR = 128, 0.25
"""Tokens of half a context, and the largest allowed relative error of a prediction."""
PROMPTS, STEPS = 3, 64
"""Prompts per round, and steps after each; several, because the first ones find cold caches."""


def measured(model: bytes, decoder: Decoder, threads: int) -> Callable[[], tuple[float, float]]:
    """Return a function that measures the median seconds of a half-context prompt and of a step after it."""
    options = session_options(threads)
    options.enable_mem_pattern = False
    clock = time.thread_time if threads == 1 else time.perf_counter
    opened = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    prompt = np.random.default_rng(0).integers(decoder.generation.context, size=HALF).tolist()

    def run(feeds: Feeds) -> dict[str, Array]:
        return ask(opened, feeds)

    def measure() -> tuple[float, float]:
        prompts, steps = [], []
        for _ in range(PROMPTS):
            cache = decoder.cache()
            began = clock()
            last = decoder.read(run, prompt, cache)
            prompts.append(clock() - began)
            for _ in range(STEPS):
                began = clock()
                last = decoder.read(run, [last.token], cache)
                steps.append(clock() - began)
        return median(prompts), median(steps)

    measure()
    return measure


def compared(name: str, threads: int, rounds: int) -> Iterator[Comparison]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES[name], max_position_embeddings=2 * HALF, tie_word_embeddings=True))
    network, sizes = CachedModel(model.eval()), Sizes.of(model.config.to_dict(), name)
    decoder = Decoder(name, Generation(context=2 * HALF, most=HALF, end=()), "", network.cache)
    for precision in PRECISIONS:
        probes = Probes(sizes, precision, threads, HALF)
        measure = measured(ort_format(in_precision(network, precision)), decoder, threads)
        pairs = []
        for _ in range(rounds):
            speed = probes.speed()
            step = speed.call(1, HALF + STEPS // 2).seconds + speed.reading
            pairs.append(((speed.prompt(HALF).seconds, step), measure()))
        for place, (what, tokens) in enumerate((("prefill", HALF), ("decode", 1))):
            predicted, actual = (tokens / median(each[side][place] for each in pairs) for side in (0, 1))
            ratio = median(each[1][place] / each[0][place] for each in pairs)
            case = f"{name} {precision}, {what}: {predicted:,.0f} tokens/s, measured {actual:,.0f}"
            holds = 1 - NEAR <= ratio <= 1 + NEAR
            yield Comparison(case, "predicted / measured", round(ratio, 3), None, None, None, 1 + NEAR, holds)


def main() -> int:
    """Run the benchmark; return 1 if a prediction is off by more than a quarter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*SIZES], help="measure one size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="without the largest, in three rounds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = [options.only] if options.only else [*SIZES][:2] if options.quick else [*SIZES]
    rounds = 3 if options.quick else options.rounds
    comparisons = [each for name in names for each in compared(name, options.threads, rounds)]
    # quick=True: save no result, since the report plots ratios to a peer.
    return report("decoding", comparisons, as_json=options.json, quick=True)


if __name__ == "__main__":
    sys.exit(main())
