"""Texts as inputs of a model of rows."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from isthmus.features.errors import PackageError
from isthmus.features.types import Float64, String
from isthmus.features.values.columns import from_python
from isthmus.package.inputs import ModelInput, feeds
from isthmus.package.texts import TextTokenizer

WORDS = Tokenizer(models.WordLevel({"[PAD]": 0, "?": 1, "stop": 2}, "?"))


def test_null_is_an_empty_text_and_each_row_has_a_mask() -> None:
    inputs = [ModelInput("note", String, text=True, tokenizer=TextTokenizer(WORDS, 4)), ModelInput("x", Float64)]
    columns = {"note": from_python(["stop", None, "go"], String), "x": from_python([1.0, None, 3.0], Float64)}
    fed = feeds(inputs, columns)
    assert fed["input_ids"].tolist() == [[2], [0], [1]]
    assert fed["attention_mask"].tolist() == [[1], [0], [1]]
    np.testing.assert_array_equal(fed["numeric"], np.array([[1], [np.nan], [3]], np.float32))


def test_a_tokenizer_returns_from_its_file() -> None:
    written = TextTokenizer(WORDS, 3)
    read = TextTokenizer.load(written.file, "package p")
    assert (read.tokens, read.size, read.file) == (3, 3, written.file)


def test_a_tokenizer_that_keeps_too_many_tokens_is_refused() -> None:
    data = TextTokenizer(WORDS, 10**12).file
    with pytest.raises(PackageError, match=r"truncates texts to 1,000,000,000,000 tokens; expected 1 to 65,536"):
        TextTokenizer.load(data, "package p")


@pytest.mark.parametrize("change", [b"", b"{}", b"[1", {"truncation": None}])
def test_a_file_that_is_no_such_tokenizer_is_named(change: bytes | dict[str, object]) -> None:
    data = change if isinstance(change, bytes) else json.dumps({**json.loads(WORDS.to_str()), **change}).encode()
    with pytest.raises(PackageError, match=r"package p: tokenizer\.json: is not a tokenizer that truncates texts"):
        TextTokenizer.load(data, "package p")
