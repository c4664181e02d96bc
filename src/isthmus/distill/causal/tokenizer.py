"""The tokenizer of a model as a file, and that of the tokens that some texts use alone."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.distill.decoder.tokenizer import around
from isthmus.distill.types import Index
from isthmus.features.errors import ConfigurationError, DataError, Problem, extra
from isthmus.package.generation.tokenizer import ALPHABET, opened

FILE = "tokenizer.json"
PADDED = 0.01
"""The share of a model's vocabulary that may have no token: some models round its size up."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer, and which tokens of the model it has.

    Attributes:
        tokenizer: `tokenizer.json`.
        end: the token that ends a text.
        size: number of the student's tokens.
        kept: int64 (size,), the model's number of each of these tokens, ascending; None if they are all of them.
        begin: the tokens before each text, which the file puts there.
    """

    tokenizer: bytes
    end: int
    size: int
    kept: Index | None = None
    begin: tuple[int, ...] = ()

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of each text's tokens, behind those that begin one.

        What a text has of control tokens is read as plain text.
        """
        reader = opened(self.tokenizer)
        read = reader.encode_batch([*texts], add_special_tokens=False)
        return [[*self.begin, *encoding.ids] for encoding in read]

    def pruned(self, texts: Iterable[Sequence[int]], others: Iterable[Sequence[int]], where: str) -> "Vocabulary":
        """The vocabulary of the tokens of some texts.

        Beside them it keeps the tokens that these are merged from, so that their texts have the same tokens as before,
        single bytes, so that any text has some, and special tokens.

        Args:
            texts: the tokens of each.
            others: the tokens of texts that are not counted, but needed.
            where: for messages.

        Raises:
            ConfigurationError: the tokenizer is no BPE.
            DataError: a tokenizer without single bytes lacks a token of the other texts.
        """
        content = json.loads(self.tokenizer)
        model = content["model"]
        if model.get("type") != "BPE":
            problem = Problem("vocabulary", f"the tokenizer is a {model.get('type')}", 'a BPE, or "shared"')
            raise ConfigurationError(where, [problem])
        words: dict[str, int] = model["vocab"]
        names = {place: word for word, place in words.items()}
        special = {item["id"]: item["content"] for item in content.get("added_tokens", ())}
        wanted = {names[place] for text in texts for place in text if place in names}
        alphabet = _bytes(content, words)
        wanted |= alphabet | {word for word in special.values() if word in words}
        steering = (model.get("unk_token"), *map(names.get, (self.end, *self.begin)))
        wanted |= {word for word in steering if word in words}
        merges = [tuple(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"]]
        before = -1
        while before != len(wanted):  # a part may be merged by a later pair, too
            before = len(wanted)
            for left, right in reversed(merges):
                if left + right in wanted:
                    wanted |= {left, right}
        kept = np.array(sorted({words[word] for word in wanted} | {*special}), np.int64)
        if not alphabet:
            self._require({place for text in others for place in text}, kept, {**names, **special}, where)
        place_of = {int(place): number for number, place in enumerate(kept)}
        model["vocab"] = {word: place_of[words[word]] for word in sorted(wanted, key=words.__getitem__)}
        model["merges"] = [[*pair] for pair in merges if {*pair, "".join(pair)} <= wanted]
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
                f"the training texts have no {shown}{' …' if len(lacking) > 5 else ''}, which others need",
                expected="all tokens of the texts",
                remedy='add texts that have them, or set vocabulary="shared"',
            )


def of(tokenizer: Any, config: Any, where: str) -> Vocabulary:
    """The vocabulary of a model of transformers and its tokenizer: of transformers, or of the library tokenizers.

    Raises:
        ConfigurationError: the tokenizer has another number of tokens than the model, or nothing ends a text.
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
        problems.append(Problem("tokenizer", f"has {most:,} tokens", f"the model's {size:,}: it is of another model"))
    ends = config.eos_token_id
    end = ends[0] if isinstance(ends, list | tuple) and ends else ends
    if not isinstance(end, int) or backend.id_to_token(end) is None:
        found = f"eos_token_id {end!r}, which the tokenizer lacks" if isinstance(end, int) else "no eos_token_id"
        problems.append(Problem("configuration of the model", found, "the token that ends a text"))
    if problems:
        raise ConfigurationError(where, problems)
    file = opened(backend.to_str().encode()).to_str().encode()
    begin, _ = around(file)
    return Vocabulary(file, int(end), size, begin=tuple(begin))


def _bytes(content: Mapping[str, Any], words: Mapping[str, int]) -> set[str]:
    """The tokens of single bytes, where all texts are made of such; bytes that no text has may lack one."""
    if content["model"].get("byte_fallback"):
        return {f"<0x{byte:02X}>" for byte in range(256)} & words.keys()
    parts = json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    return ALPHABET.keys() & words.keys() if '"ByteLevel"' in parts else set()


def _renumber(processor: Any, place_of: Mapping[int, int]) -> None:
    """What a post-processor adds, by the new numbers."""
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
