"""The tokenizer of a package: byte-level BPE of the library tokenizers, and decoding byte by byte."""

import codecs
import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from isthmus.features.errors import DependencyError, PackageError, RequestError, extra
from isthmus.package.generation.prompt import Generation

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Own


def _alphabet() -> dict[str, int]:
    """Map each character of a byte-level BPE vocabulary to the byte it stands for, as in GPT-2."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


ALPHABET = _alphabet()
LONG = 1 << 12
"""Characters of a text that takes milliseconds to tokenize."""


def load_tokenizer(data: bytes) -> "Own":
    with extra("generate"):
        from tokenizers import Tokenizer as Own
    tokenizer = Own.from_buffer(data)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


class Tokenizer:
    """The tokenizer of a package, from the content of its `tokenizer.json`. `where` names the file in messages.

    Raises PackageError if the file is not a tokenizer or its control tokens differ from the package's, and
    DependencyError without the extra `generate`.
    """

    def __init__(self, data: bytes, generation: Generation, where: str = "tokenizer.json") -> None:
        self._generation, self._where = generation, where
        try:
            self._own = load_tokenizer(data)
            added = json.loads(data)["added_tokens"]
        except DependencyError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            raise PackageError(
                where, f"is not a tokenizer ({error})", expected="a file of the library tokenizers"
            ) from error
        self._control = {token["id"] for token in added if token["special"]}
        if self._control != (declared := {control.token for control in generation.control}):
            raise PackageError(where, f"has control tokens {sorted(self._control)}", expected=f"{sorted(declared)}")

    @property
    def size(self) -> int:
        return max(self._own.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, parts: Sequence[str | int], most: int | None = None) -> list[int]:
        """Return the token ids of a prompt, to feed a model: its start tokens, then the tokens of each part in order.

        A part is a text or the id of a control token. Raises RequestError if a text has characters without tokens, or
        turns into a control token. With `most` (a number of tokens), also raises it for a long text that certainly
        exceeds `most`, without tokenizing it. The result can still be longer than `most`, so check its length.
        """
        texts = [part for part in parts if isinstance(part, str)]
        if most is not None and sum(map(len, texts)) > LONG and (least := sum(map(self.least, texts))) > most:
            raise self._generation.too_long(f"{least:,} tokens or more")
        tokens = [*self._generation.begin]
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
                continue
            tokens += self._plain(part)
        return tokens

    def _plain(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("prompt", "has half of a pair of surrogates", expected="text") from error
        # Unlike encoding one text, encoding a batch releases the interpreter for other threads.
        (read,) = (
            self._own.encode_batch([text], add_special_tokens=False)
            if len(text) > LONG
            else [self._own.encode(text, add_special_tokens=False)]
        )
        tokens: list[int] = read.ids
        if stray := self._control.intersection(tokens):
            raise RequestError("prompt", f"becomes control token {min(stray)}", expected="text")
        # The tokenizer silently drops characters without tokens.
        decoded = b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")
        if self._normal(decoded) != self._normal(text):
            raise RequestError(
                "prompt", "has characters that the model has no tokens for", expected="characters of its vocabulary"
            )
        return tokens

    def least(self, text: str) -> int:
        """Return a lower bound on the number of tokens of `text`, to reject a long text without tokenizing it."""
        data = np.frombuffer(self._normal(text).encode(errors="replace"), np.uint8)
        return int(np.bincount(data, minlength=256) @ self._shares)

    @cached_property
    def _shares(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return for each byte 1 / the length of the longest token with it, or 0. A token's bytes sum to at most 1."""
        pieces = {self.bytes_of(token) for token in self._own.get_vocab(with_added_tokens=True).values()}
        # Text may contain an added token's characters in composed form.
        pieces |= {self._normal(piece.decode(errors="replace")).encode() for piece in pieces if not piece.isascii()}
        shares = np.zeros(256)
        for piece in sorted(pieces, key=len):
            shares[[*piece]] = 1 / max(len(piece), 1)
        return shares

    def _normal(self, text: str) -> str:
        normalizer = self._own.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token id stands for, to turn generated tokens into text.

        The bytes may be only a part of a UTF-8 character. They are empty for a control token or an unknown id.
        """
        letters = None if token in self._control else self._own.id_to_token(token)
        if letters is None:
            return b""
        known = [ALPHABET.get(letter) for letter in letters]
        return letters.encode() if None in known else bytes(byte for byte in known if byte is not None)


class GrowingText:
    """A decoder of generated tokens. `add` returns whole characters, `end` a replacement for an incomplete one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.bytes_of(token))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)
