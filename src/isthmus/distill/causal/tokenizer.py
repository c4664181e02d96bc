"""A model's tokenizer file, as a `Vocabulary`, and how to prune it to the tokens of some texts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.distill.decoder.tokenizer import surrounding_tokens
from isthmus.distill.types import Index
from isthmus.features.errors import ConfigurationError, DataError, Problem, extra
from isthmus.package.generation.tokenizer import ALPHABET, load_tokenizer

FILE = "tokenizer.json"
PADDED = 0.01
"""Share of a model's vocabulary that may be unused: some models round its size up."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer, as the content of its `tokenizer.json`, and the model's tokens that it keeps.

    `kept`, int64 (size,), has the model's id of each kept token, ascending; None if the vocabulary is not pruned.
    `begin` are the tokens that the tokenizer puts before each text, and `end` is the token that ends a text.
    """

    tokenizer: bytes
    end: int
    size: int
    kept: Index | None = None
    begin: tuple[int, ...] = ()

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        reader = load_tokenizer(self.tokenizer)
        encodings = reader.encode_batch([*texts], add_special_tokens=False)
        return [[*self.begin, *encoding.ids] for encoding in encodings]

    def pruned(
        self, texts: Iterable[Sequence[int]], evaluation_texts: Iterable[Sequence[int]], where: str
    ) -> "Vocabulary":
        """Return a smaller vocabulary, with new token ids, that splits `texts` into the same tokens as this one.

        A small student needs fewer embeddings with it. It keeps the tokens of `texts`, the shorter tokens that merge
        into them, special tokens, and single bytes, which can encode any text. `texts` and `evaluation_texts` have the
        token ids of each text, and `where` names the declaration in error messages.

        Raises a ConfigurationError if the tokenizer is not BPE. If the tokenizer has no single bytes, raises a
        DataError for a token that occurs only in `evaluation_texts`, the validation and test texts.
        """
        content = json.loads(self.tokenizer)
        model = content["model"]
        if model.get("type") != "BPE":
            problem = Problem("vocabulary", f"the tokenizer is a {model.get('type')}", 'a BPE tokenizer, or "shared"')
            raise ConfigurationError(where, [problem])
        words: dict[str, int] = model["vocab"]
        names = {place: word for word, place in words.items()}
        special = {item["id"]: item["content"] for item in content.get("added_tokens", ())}
        needed = {names[place] for text in texts for place in text if place in names}
        alphabet = _bytes(content, words)
        needed |= alphabet | {word for word in special.values() if word in words}
        steering = (model.get("unk_token"), *map(names.get, (self.end, *self.begin)))
        needed |= {word for word in steering if word in words}
        merges = [tuple(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"]]
        before = -1
        while before != len(needed):  # a part may itself be merged, by a later pair
            before = len(needed)
            for left, right in reversed(merges):
                if left + right in needed:
                    needed |= {left, right}
        kept = np.array(sorted({words[word] for word in needed} | {*special}), np.int64)
        if not alphabet:
            self._require({place for text in evaluation_texts for place in text}, kept, {**names, **special}, where)
        place_of = {int(place): number for number, place in enumerate(kept)}
        model["vocab"] = {word: place_of[words[word]] for word in sorted(needed, key=words.__getitem__)}
        model["merges"] = [[*pair] for pair in merges if {*pair, "".join(pair)} <= needed]
        for item in content.get("added_tokens", ()):
            item["id"] = place_of[item["id"]]
        _renumber(content.get("post_processor"), place_of)
        file = json.dumps(content, ensure_ascii=False).encode()
        return Vocabulary(file, place_of[self.end], len(kept), kept, tuple(place_of[place] for place in self.begin))

    def _require(self, needed: set[int], kept: Index, names: Mapping[int, str], where: str) -> None:
        if lacking := sorted(needed - {*kept.tolist()}):
            shown = ", ".join(repr(names.get(place, str(place))) for place in lacking[:5])
            raise DataError(
                f"{where}: vocabulary",
                f"the training texts lack {shown}{' …' if len(lacking) > 5 else ''}, which texts of other parts need",
                expected="training texts with all tokens",
                remedy='add texts that have them, or set vocabulary="shared"',
            )


def full_vocabulary(tokenizer: Any, config: Any, where: str) -> Vocabulary:
    """Check that a tokenizer belongs to a model, and return it as a Vocabulary that keeps all tokens of the model.

    `tokenizer` is a Tokenizer of the library tokenizers, or a fast tokenizer of transformers. `config` is the
    configuration of the model in transformers, and `where` names the declaration in error messages. Raises a
    ConfigurationError if the tokenizer is of another type, differs from the model in size, or lacks the model's end
    token.
    """
    with extra("text"):
        from tokenizers import Tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        problem = Problem("tokenizer", f"a {type(tokenizer).__name__}", "a Tokenizer, or a fast one of transformers")
        raise ConfigurationError(where, [problem])
    size, most = config.vocab_size, max(backend.get_vocab().values(), default=-1) + 1
    problems = []
    if not size * (1 - PADDED) <= most <= size:
        problems.append(
            Problem("tokenizer", f"has {most:,} tokens", f"the model's {size:,}: it belongs to another model")
        )
    ends = config.eos_token_id
    end = ends[0] if isinstance(ends, list | tuple) and ends else ends
    if not isinstance(end, int) or backend.id_to_token(end) is None:
        found = f"eos_token_id {end!r}, which the tokenizer lacks" if isinstance(end, int) else "no eos_token_id"
        problems.append(Problem("configuration of the model", found, "an end token that the tokenizer has"))
    if problems:
        raise ConfigurationError(where, problems)
    file = load_tokenizer(backend.to_str().encode()).to_str().encode()
    begin, _ = surrounding_tokens(file, where)
    return Vocabulary(file, int(end), size, begin=tuple(begin))


def _bytes(content: Mapping[str, Any], words: Mapping[str, int]) -> set[str]:
    """Return the tokens for single bytes; empty if the tokenizer does not split every text into bytes."""
    if content["model"].get("byte_fallback"):
        return {f"<0x{byte:02X}>" for byte in range(256)} & words.keys()
    parts = json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    return ALPHABET.keys() & words.keys() if '"ByteLevel"' in parts else set()


def _renumber(processor: Any, place_of: Mapping[int, int]) -> None:
    if not isinstance(processor, dict):
        return
    for part in processor.get("processors", ()):
        _renumber(part, place_of)
    special = processor.get("special_tokens")
    for item in special.values() if isinstance(special, dict) else ():
        item["ids"] = [place_of[place] for place in item["ids"]]
    for name in ("sep", "cls"):
        if name in processor:
            word, place = processor[name]
            processor[name] = [word, place_of[place]]
