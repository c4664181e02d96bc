"""A student cut from a BERT: it begins as its teacher, as far as it keeps it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from isthmus import PrunedEncoder, Text
from isthmus.distill.teachers.pretrained import pooled
from isthmus.distill.text.pruning import factorized, nearest_kept, prune
from isthmus.features.errors import ConfigurationError

WORDS = 60


def teacher(**changes: Any) -> BertModel:
    config = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 16,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return BertModel(BertConfig(**{**config, **changes})).eval()


def cut(of: Any, declared: PrunedEncoder, *, first: bool = False, tokens: int = 12, counts: Any = None) -> Any:
    text = Text(teacher="no:function", student=declared, tokens=tokens)
    read = np.arange(WORDS)[::-1].copy() if counts is None else counts
    return prune(of, text, declared, read, "student", first=first).eval()


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1, WORDS, (3, 9), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()
    return tokens * mask, mask


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("rank", [None, 32])
def test_a_student_that_keeps_everything_is_its_teacher(rank: int | None, *, first: bool) -> None:
    of, (tokens, mask) = teacher(), texts()
    student = cut(of, PrunedEncoder(layers=(0, 1, 2), rank=rank), first=first)
    with torch.inference_mode():
        expected = pooled(of(input_ids=tokens, attention_mask=mask).last_hidden_state, mask, first=first)
        torch.testing.assert_close(student(tokens, mask), expected, atol=1e-5, rtol=0)


def test_layers_are_copied_and_parts_are_left_out() -> None:
    of, (tokens, mask) = teacher(), texts()
    student = cut(of, PrunedEncoder(layers=(2,), heads=2, inner=20, rank=8, vocabulary=30))
    assert student(tokens, mask).shape == (3, 32)
    assert student.tokens.weight.shape == (30, 8)
    assert int(student.places.max()) == 29
    assert len(student.places) == WORDS  # not the padded rows
    layer = of.encoder.layer[2]
    units = (layer.intermediate.dense.weight.norm(dim=1) * layer.output.dense.weight.norm(dim=0)).detach().numpy()
    largest = np.sort(np.argsort(-units)[:20])
    assert np.array_equal(student.layers[0].up.weight.detach(), layer.intermediate.dense.weight.detach()[largest])
    values, out = layer.attention.self.value.weight.detach(), layer.attention.output.dense.weight.detach()
    sizes = [float(values[at : at + 8].norm() * out[:, at : at + 8].norm()) for at in range(0, 32, 8)]
    rows = [row for head in sorted(np.argsort(sizes)[-2:]) for row in range(8 * head, 8 * head + 8)]
    assert np.array_equal(student.layers[0].attention.weight.detach()[32:], values[rows])


@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 99))
def test_a_pruned_token_has_the_embedding_of_the_nearest(words: int, keep: int, seed: int) -> None:
    table = torch.randn(words, 4, generator=torch.Generator().manual_seed(seed))
    kept = torch.arange(words)[:: max(1, words // keep)]
    unit = [row / row.norm() for row in table]
    for token, place in enumerate(nearest_kept(table, kept).tolist()):
        best = max(float(unit[token] @ unit[other]) for other in kept)
        assert float(unit[token] @ unit[int(kept[place])]) == pytest.approx(best, abs=1e-6)


def test_frequent_tokens_keep_their_embeddings() -> None:
    table = torch.randn(40, 16, generator=torch.Generator().manual_seed(3))
    counts = np.where(np.arange(40) < 4, 1e6, 0)
    tokens, matrix = factorized(table, counts, 4)
    torch.testing.assert_close((tokens @ matrix.T)[:4], table[:4], atol=1e-2, rtol=0)
    assert (tokens @ matrix.T - table)[4:].norm() > 1


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (PrunedEncoder(layers=(0, 3)), r"layers: .*3.*expected 0 to 2"),
        (PrunedEncoder(layers=(0,), heads=5), "heads: 5; expected at most 4"),
        (PrunedEncoder(layers=(0,), inner=49), "inner: 49; expected at most 48"),
        (PrunedEncoder(layers=(0,), rank=33), "rank: 33; expected at most 32"),
        (PrunedEncoder(layers=(0,), vocabulary=200), "vocabulary: 200; expected at most 60"),
    ],
)
def test_more_than_the_teacher_has_is_refused(declared: PrunedEncoder, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        cut(teacher(), declared)


def test_other_architectures_and_longer_texts_are_refused() -> None:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    of = RobertaModel(RobertaConfig(vocab_size=64, **small))
    with pytest.raises(
        ConfigurationError, match=r"a RobertaModel with gelu; expected a BERT with gelu.*Use an Encoder"
    ):
        cut(of, PrunedEncoder(layers=(0,)))
    with pytest.raises(ConfigurationError, match="a BertModel with relu"):
        cut(teacher(hidden_act="relu"), PrunedEncoder(layers=(0,)))
    with pytest.raises(ConfigurationError, match="tokens: 17; expected at most 16"):
        cut(teacher(), PrunedEncoder(layers=(0,)), tokens=17)
