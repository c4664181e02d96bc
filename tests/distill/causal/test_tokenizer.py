from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors

from isthmus.distill.causal.models import language
from isthmus.distill.causal.tokenizer import Vocabulary, full_vocabulary
from isthmus.distill.decoder.tokenizer import surrounding_tokens
from isthmus.features.errors import ConfigurationError, DataError
from tests.distill.causal.support import END, HERE, base, domain, general, tokenizer, words_alone

TEXTS = [*general(20, 7), *domain(20, 7)]


def whole() -> Vocabulary:
    model, words = base()
    return full_vocabulary(words, model.config, "writer")


@given(st.sets(st.sampled_from(TEXTS), min_size=1), st.text(max_size=20))
def test_a_pruned_vocabulary_reads_its_texts_as_before_and_any_text_at_all(texts: set[str], other: str) -> None:
    before = whole()
    learned = sorted(texts)
    tokens = before.tokens(learned)
    pruned = before.pruned(tokens, [], "writer")
    assert pruned.kept is not None
    assert pruned.size == len(pruned.kept) == Tokenizer.from_buffer(pruned.tokenizer).get_vocab_size() < before.size
    assert [pruned.kept[text].tolist() for text in pruned.tokens(learned)] == tokens
    assert pruned.kept[pruned.end] == before.end
    # Other texts have other tokens perhaps, but each is the same word in both vocabularies.
    ids, (words, all_words) = (
        pruned.tokens([other])[0],
        (Tokenizer.from_buffer(file) for file in (pruned.tokenizer, before.tokenizer)),
    )
    assert words.decode(ids) == other
    assert [words.id_to_token(place) for place in ids] == [all_words.id_to_token(pruned.kept[p]) for p in ids]


def test_what_looks_like_a_control_token_is_text() -> None:
    vocabulary = whole()
    (tokens,) = vocabulary.tokens([f"a{END}b"])
    assert vocabulary.end not in tokens
    assert Tokenizer.from_buffer(vocabulary.tokenizer).decode(tokens) == f"a{END}b"
    pruned = vocabulary.pruned([tokens], [], "writer")
    assert pruned.end not in pruned.tokens([f"a{END}b"])[0]


def test_what_a_post_processor_adds_is_renumbered() -> None:
    model, words = base()
    words = Tokenizer.from_str(words.to_str())
    end = model.config.eos_token_id
    words.post_processor = processors.Sequence([
        processors.ByteLevel(), processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, end)]),
    ])  # fmt: skip
    vocabulary = full_vocabulary(words, model.config, "writer")
    pruned = vocabulary.pruned(vocabulary.tokens(["the hill"]), [], "writer")
    assert Tokenizer.from_buffer(pruned.tokenizer).encode("the hill").ids[-1] == pruned.end


def test_a_token_that_begins_texts_is_before_those_that_are_learned_from_and_stays() -> None:
    """As Llama 3's tokenizer puts it before what the package of a student reads."""
    model, words = base()
    words = Tokenizer.from_str(words.to_str())
    end, first = model.config.eos_token_id, words.token_to_id("Ġhill")
    words.post_processor = processors.TemplateProcessing(single="Ġhill $A", special_tokens=[("Ġhill", first)])
    vocabulary = full_vocabulary(words, model.config, "writer")
    (text,) = vocabulary.tokens(["the fox"])
    assert text == [first, *whole().tokens(["the fox"])[0]]
    assert vocabulary.tokens([""]) == [[first]]
    pruned = vocabulary.pruned([text], [], "writer")
    assert pruned.kept is not None
    assert pruned.kept[pruned.tokens(["the fox"])[0]].tolist() == text
    assert surrounding_tokens(pruned.tokenizer) == ([*pruned.begin], [])
    assert pruned.kept[[*pruned.begin, pruned.end]].tolist() == [first, end]


@pytest.mark.parametrize("function", ["foreign", "endless", "eager", "no_model", "absent"])
def test_a_model_and_a_tokenizer_that_do_not_fit_are_refused(function: str) -> None:
    said = {
        "foreign": r"tokenizer: has 2 tokens; expected the model's \d+: it belongs to another model",
        "endless": "configuration of the model: no eos_token_id; expected an end token that the tokenizer has",
        "eager": "has the attention 'eager', which cannot separate packed texts; expected 'sdpa'",
        "no_model": "returns a int; expected a model and its tokenizer",
        "absent": r"absent: cannot be imported \(module .* has no attribute 'absent'\)",
    }
    with pytest.raises(ConfigurationError, match=said[function]):
        language(f"{HERE}:{function}", "writer: base")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a folder with tokenizer\.json"):
        language(str(tmp_path), "writer: base")


def test_a_folder_has_the_model_and_its_tokenizer(tmp_path: Any) -> None:
    model, words = base()
    model.save_pretrained(tmp_path)
    words.save(str(tmp_path / "tokenizer.json"))
    found = language(str(tmp_path), "writer: base")
    assert found.vocabulary.tokens(TEXTS) == whole().tokens(TEXTS)
    assert {*found.model.state_dict()} == {*model.state_dict()}


def test_a_token_that_is_needed_and_was_not_learned_is_named() -> None:
    model, words = words_alone()
    vocabulary = full_vocabulary(words, model.config, "writer")
    learned, needed = vocabulary.tokens(["the fox"]), vocabulary.tokens(["the hill"])
    assert vocabulary.pruned(learned, learned, "writer").size < vocabulary.size
    with pytest.raises(DataError, match="vocabulary: the training texts lack 'hill', which texts of other parts need"):
        vocabulary.pruned(learned, needed, "writer")


def test_only_a_vocabulary_of_merges_is_pruned() -> None:
    words = Tokenizer(models.WordLevel({END: 0, "the": 1}, unk_token=END))
    vocabulary = Vocabulary(words.to_str().encode(), 0, 2)
    with pytest.raises(ConfigurationError, match='the tokenizer is a WordLevel; expected a BPE tokenizer, or "shared"'):
        vocabulary.pruned([[1]], [], "writer")


def test_merges_that_meet_a_token_on_two_ways_are_all_kept() -> None:
    words = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5, END: 6}
    found = Tokenizer(models.BPE(words, [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]))
    vocabulary = Vocabulary(found.to_str().encode(), 6, 7)
    pruned = vocabulary.pruned([[5]], [], "writer")
    assert pruned.kept is not None
    assert np.array_equal(pruned.kept, [0, 1, 2, 3, 4, 5, 6])


def test_the_tokenizer_of_transformers_will_do() -> None:
    from transformers import PreTrainedTokenizerFast

    model, _ = base()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token=END)
    assert full_vocabulary(fast, model.config, "writer").tokens(TEXTS) == whole().tokens(TEXTS)
