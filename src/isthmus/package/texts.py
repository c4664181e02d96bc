"""The tokenizer of a model that reads a text, and the tensors of its tokens."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.features.errors import PackageError, extra

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
INPUT_IDS, MASK = "input_ids", "attention_mask"
LONGEST = 1 << 16
"""Most tokens that a model reads of a text."""

Array = np.ndarray[Any, Any]


class TextTokenizer:
    """Tokenizes texts for a student: truncates them and pads with token 0.

    Args:
        tokenizer: tokenizer of the library tokenizers, whose truncation and padding are replaced.
        tokens: tokens of a text to keep.
    """

    def __init__(self, tokenizer: "Tokenizer", tokens: int) -> None:
        self._tokenizer, self.tokens, self.size = tokenizer, tokens, tokenizer.get_vocab_size()
        tokenizer.no_padding()
        tokenizer.enable_truncation(tokens)

    @classmethod
    def load(cls, data: bytes, where: str) -> "TextTokenizer":
        """Open the content of a `tokenizer.json`, as in `file`; raise a PackageError if it is another file."""
        with extra("generate"):
            from tokenizers import Tokenizer
        try:
            tokenizer = Tokenizer.from_buffer(data)
            tokens = (tokenizer.truncation or {})["max_length"]
        except Exception as error:  # tokenizers raises plain Exception
            found = f"is not a tokenizer that truncates texts ({error!r:.200})"
            raise PackageError(f"{where}: {TOKENIZER}", found, expected="a file of the library tokenizers") from error
        if not 1 <= tokens <= LONGEST:
            expected = f"1 to {LONGEST:,}"
            raise PackageError(f"{where}: {TOKENIZER}", f"truncates texts to {tokens:,} tokens", expected=expected)
        return cls(tokenizer, tokens)

    @cached_property
    def file(self) -> bytes:
        """The content of `tokenizer.json`, which truncates texts as the student does."""
        return (self._tokenizer.to_str(pretty=False) + "\n").encode()

    def read(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Tokenize n texts; return tokens, int32 (n, tokens), padded with 0, and the length of each before the cut."""
        found = np.zeros((len(texts), self.tokens), np.int32)
        lengths = np.zeros(len(texts), np.int64)
        added = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        for begin in range(0, len(texts), 1024):
            for row, read in enumerate(self._tokenizer.encode_batch(texts[begin : begin + 1024]), begin):
                lengths[row] = len(read.ids) + sum(len(rest.ids) - added for rest in read.overflowing)
                found[row, : len(read.ids)] = read.ids
        return found, lengths

    def feeds(self, texts: Sequence[str]) -> dict[str, Array]:
        """Return the input tensors of n texts, see `token_tensors`."""
        return token_tensors(*self.read(texts))


def token_tensors(tokens: Array, lengths: Array) -> dict[str, Array]:
    """Return tokens (n, tokens) and their mask, cut to the longest text, as int64.

    The lengths count, since a text may contain the padding token.
    """
    kept = tokens[:, : int(lengths.max(initial=1))].astype(np.int64)
    return {INPUT_IDS: kept, MASK: (np.arange(kept.shape[1]) < lengths[:, None]).astype(np.int64)}
