"""The graph with a cache, beside the model of transformers and an oracle without a cache."""

from typing import Any

import numpy as np
import pytest
import torch

from isthmus.distill.decoder.graph import graph
from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.onnx.runtime import Run, ask, ort_format, session
from isthmus.features.errors import ConfigurationError, PackageError, RequestError
from isthmus.package.generation.decoder import PART, Decoder
from isthmus.package.generation.prompt import LOGITS, NEW, Generation
from tests.distill.decoder.support import greedy_naively, tiny

GENERATION = Generation(context=384, most=383, end=(0,))
SHAPE = (4, 2, 16)


def decoder(owner: str = "a" * 64, generation: Generation = GENERATION, shape: tuple[int, ...] = SHAPE) -> Decoder:
    return Decoder("the model", generation, owner, shape)


@pytest.fixture(scope="module")
def run() -> Run:
    return _running(tiny())


def _running(model: Any, *, products: bool = False) -> Run:
    opened = session(ort_format(graph(CachedModel(model), products=products).SerializeToString()), 1)
    return lambda feeds: ask(opened, feeds)


def _greedy(run: Run, prompt: list[int], most: int) -> list[int]:
    return [read.token for read in decoder().greedy(run, prompt, most)]


def test_a_hundred_prompts_go_on_as_in_torch(run: Run) -> None:
    model: Any = tiny()
    draw = torch.Generator().manual_seed(1)
    for length in (1, 2, 9, 33):
        prompts = torch.randint(2, 600, (25, length), generator=draw)
        expected = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=64, pad_token_id=0
        )[:, length:]
        for prompt, tokens in zip(prompts.tolist(), expected.tolist(), strict=True):
            end = tokens.index(0) + 1 if 0 in tokens else len(tokens)
            assert _greedy(run, prompt, 64) == tokens[:end]


def test_texts_end_where_the_oracle_says(run: Run) -> None:
    model = tiny()
    draw = np.random.default_rng(2)
    said = [greedy_naively(model, prompt, 24) for prompt in draw.integers(2, 600, (8, 5)).tolist()]
    assert len({tuple(tokens) for tokens in said}) == 8
    assert [_greedy(run, prompt, 24) for prompt in np.random.default_rng(2).integers(2, 600, (8, 5)).tolist()] == said


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 64, "rope_theta": 1e4}},
    ],
)  # fmt: skip
def test_a_text_in_parts_is_the_whole_text(changes: dict[str, Any], products: bool) -> None:
    model: Any = tiny(**changes)
    run, own = _running(model, products=products), CachedModel(model)
    shape = (4, own.shared, own.width)
    tokens = np.random.default_rng(3).integers(2, 600, PART + 20).tolist()
    for cuts in ((len(tokens),), (1, 2, 3, 200), (250,)):
        cache, begin = decoder(shape=shape).cache(), 0
        for end in (*cuts, len(tokens)):
            if end > begin:
                said = decoder(shape=shape).read(run, tokens[begin:end], cache)
            begin = end
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0, -1].numpy()
        assert np.abs(said.logits - expected).max() < 1e-4
        assert cache.length == len(tokens)
    with torch.inference_mode():
        logits, new = own(torch.tensor([tokens[:1]]), torch.from_numpy(cache.values[None, :0]))
    assert np.abs(new[0].numpy() - cache.values[:1]).max() < 1e-4
    assert logits.shape == (1, 640)


def test_a_prompt_must_fit_the_context() -> None:
    with pytest.raises(
        RequestError, match="has 384 tokens, and the context of the model 384; expected 383 tokens at most"
    ):
        decoder().require_prompt([1] * 384)
    with pytest.raises(RequestError, match="has no tokens"):
        decoder().require_prompt([])
    assert decoder().require_prompt([1] * 383) == 1


def test_the_end_of_the_context_ends_a_text(run: Run) -> None:
    assert len(_greedy(run, [5] * 380, 64)) == 4


def test_a_cache_is_of_one_model_alone(run: Run) -> None:
    foreign = decoder("b" * 64).cache()
    with pytest.raises(
        PackageError, match=r"got the cache of model bbbbbbbbbbbb.*expected a cache of model aaaaaaaaaaaa"
    ):
        decoder().read(run, [5], foreign)
    other = decoder(shape=(4, 2, 8)).cache()
    with pytest.raises(PackageError, match=r"\[4, 2, 8\] per token; expected a cache of model a+, \[4, 2, 16\]"):
        decoder().read(run, [5], other)
    small = decoder().cache(2)
    with pytest.raises(RequestError, match="3 tokens; expected 2 at most"):
        decoder().read(run, [5, 6, 7], small)


def test_logits_that_are_no_numbers_are_an_error(run: Run) -> None:
    def broken(feeds: dict[str, Any]) -> dict[str, Any]:
        answers = run(feeds)
        logits = answers[LOGITS].copy()
        logits[0, 7] = np.nan
        return {LOGITS: logits, NEW: answers[NEW]}

    with pytest.raises(PackageError, match="has 1 logits that are NaN or infinite after 0 tokens"):
        next(decoder().greedy(broken, [5, 6]))


def test_what_is_no_llama_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(ConfigurationError, match="is a GPT2LMHeadModel; expected a LlamaForCausalLM"):
        CachedModel(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ConfigurationError, match="has rotations of type dynamic"):
        CachedModel(tiny(rope_parameters=rope))
    with pytest.raises(ConfigurationError, match="has the activation gelu; expected silu"):
        CachedModel(tiny(hidden_act="gelu"))
