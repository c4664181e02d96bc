"""The tokenizer of a student: the teacher's, or one with the frequent words of the training texts and characters."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from isthmus.distill.types import Array
from isthmus.features.errors import extra

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNKNOWN, BEGIN = "[PAD]", "[UNK]", "[CLS]"
_CHARACTERS = 64
"""Characters with tokens of their own, at most a quarter of a vocabulary."""


class TextTokenizer:
    """A tokenizer as a student uses it: it truncates texts and pads with token 0.

    Args:
        tokenizer: tokenizer of the library tokenizers, whose truncation and padding are replaced.
        tokens: tokens of a text to keep.
    """

    def __init__(self, tokenizer: "Tokenizer", tokens: int) -> None:
        self._tokenizer, self.tokens, self.size = tokenizer, tokens, tokenizer.get_vocab_size()
        tokenizer.no_padding()
        tokenizer.enable_truncation(tokens)

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


class StudentTokenizer(TextTokenizer):
    """A WordPiece tokenizer (Schuster and Nakajima, ICASSP 2012) whose pieces are frequent words and characters.

    Every text begins with the token [CLS], so no text is empty. Padding is token 0. The trainer of the library
    tokenizers is not used, because it returns different pieces each time.

    Args:
        texts: texts to count words in.
        size: tokens, at most.
        tokens: tokens of a text to keep, with [CLS].
    """

    def __init__(self, texts: Iterable[str], size: int, tokens: int) -> None:
        with extra("text"):
            from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
        normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        words: Counter[str] = Counter()
        for text in texts:
            words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
        characters: Counter[str] = Counter()
        for word, count in words.items():
            characters.update(dict.fromkeys(word, count))
        single = _frequent(characters, min(_CHARACTERS, size // 8))
        pieces = [PAD, UNKNOWN, BEGIN, *single, *(f"##{letter}" for letter in single)]
        several = Counter({word: count for word, count in words.items() if len(word) > 1})
        pieces += _frequent(several, size - len(pieces))
        ids = {piece: number for number, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.WordPiece(ids, unk_token=UNKNOWN))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, ids[BEGIN])]
        )
        super().__init__(tokenizer, tokens)


def _frequent(counts: Counter[str], most: int) -> list[str]:
    return sorted(counts, key=lambda item: (-counts[item], item))[:most]
