"""A tokenizer with the frequent words of the training texts and characters."""

from collections import Counter
from collections.abc import Iterable

from isthmus.features.errors import extra
from isthmus.package.texts import TextTokenizer

PAD, UNKNOWN, BEGIN = "[PAD]", "[UNK]", "[CLS]"
_CHARACTERS = 64
"""Characters with tokens of their own, at most a quarter of a vocabulary."""


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
