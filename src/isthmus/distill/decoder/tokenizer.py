"""Checks at export that the tokenizers of servers and clients support every part of a `tokenizer.json`."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from isthmus.features.errors import ConfigurationError, Problem
from isthmus.package.generation.prompt import Control, Generation
from isthmus.package.generation.tokenizer import ALPHABET, Tokenizer, load_tokenizer

_REGEX = re.compile(
    r"""(?: \(\?i:[^()\[\]\\]*\)            # letters in either case
        | \(\?(?:[:!=]|<[!=]) | \((?!\?) | [)|]                  # groups and alternatives
        | \\[pP]\{[A-Z][a-z]?\} | \\[sSdrnt] | \\[\\^$.*+?()\[\]{}|/]
        | \[\^? (?: \\[pP]\{[A-Z][a-z]?\} | \\[sdrnt] | \\[\\^$.*+?()\[\]{}|/-] | [^\\\[\]&] )+ \]
        | (?: [?*+] | \{[0-9]+(?:,[0-9]*)?\} ) (?![+])
        | [^\\\[\](){}|?*+^$.] | \\ (?=$) (?!)
        )*""",
    re.VERBOSE,
)
"""Regular expressions that `tokenizer.mjs` can translate: no possessive quantifiers, flags or named groups."""
_BPE = {"dropout": (None, 0, 0.0), "unk_token": (None,), "continuing_subword_prefix": (None, ""),
        "end_of_word_suffix": (None, ""), "byte_fallback": (None, False)}  # fmt: skip
_SPLITS = ("Isolated", "Removed")
_RARE = 0xF1
"""Bytes from here on start no assigned character; 0xC0 and 0xC1 never occur in UTF-8."""


def require_interpretable(data: bytes, where: str = "tokenizer.json") -> dict[str, Any]:
    try:
        file: dict[str, Any] = json.loads(data)
        problems = [*_problems(file)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = Problem(where, f"is not a tokenizer ({error!r})", "a file of the library tokenizers")
        raise ConfigurationError("decoding", [problem]) from error
    if problems:
        shown = [Problem(f"{where}: {part}", found, expected) for part, found, expected in problems]
        raise ConfigurationError("decoding", shown, remedy="use a byte-level BPE tokenizer, as GPT-2 and Llama 3 do")
    return file


def new_generation(
    data: bytes, *, context: int, most: int, end: Sequence[int], template: str, where: str = "tokenizer.json"
) -> tuple[Generation, Tokenizer]:
    """Create a package's settings for text generation and its tokenizer, and check that they fit together.

    Args:
        data: content of a `tokenizer.json`.
        context: maximum number of tokens of prompt and answer together.
        most: maximum number of tokens of an answer, below `context`.
        end: tokens that end an answer.
        template: text that contains {prompt}, which is replaced by the user's text.
        where: name of the tokenizer file in error messages.

    Raises:
        ConfigurationError: the tokenizer is not supported, or a setting is wrong.
    """
    file = require_interpretable(data, where)
    control = tuple(Control(token["content"], token["id"]) for token in file["added_tokens"] if token["special"])
    begin, after = surrounding_tokens(data, where)
    problems = []
    if after:
        problems.append(Problem(f"{where}: post_processor", f"adds {after} after a text", "tokens before it only"))
    if not 0 < most < context:
        problems.append(Problem("most", f"{most}", f"1 to {context - 1}, below the context"))
    if "{prompt}" not in template:
        problems.append(
            Problem("template", f"{template!r:.80} lacks {{prompt}}", "{prompt}, where the user's text goes")
        )
    problems += [
        Problem("template", f"has {token['content']!r}, which users can type", "special control tokens only")
        for token in file["added_tokens"]
        if not token["special"] and token["content"] in template
    ]
    if not end:
        problems.append(Problem("end", "empty", "the token that ends a text"))
    if problems:
        raise ConfigurationError("decoding", problems)
    generation = Generation(context, most, tuple(end), tuple(begin), control, template)
    return generation, Tokenizer(data, generation, where)


def surrounding_tokens(data: bytes, where: str = "tokenizer.json") -> tuple[list[int], list[int]]:
    """Return the token ids that a tokenizer adds before every text, and the token ids that it adds after every text.

    `data` is the content of the `tokenizer.json`, and `where` names it in error messages. Raises a ConfigurationError
    if the post-processor drops or repeats tokens of the text.
    """
    own = load_tokenizer(data)
    bare, full = (own.encode("a", add_special_tokens=special).ids for special in (False, True))
    own.post_processor = None
    if own.encode("a").ids != bare:
        problem = "drops or repeats tokens of a text"
        raise ConfigurationError(where, [Problem("post_processor", problem, "one that only adds tokens to a text")])
    places = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
    at = places[-1]
    return full[:at], full[at + len(bare) :]


def _problems(file: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    model = file["model"]
    if model["type"] != "BPE":
        yield "model", f"is {model['type']}", "BPE"
        return
    for name, supported in _BPE.items():
        if model.get(name) not in supported:
            yield f"model.{name}", f"{model[name]!r}", f"{supported[0]!r}"
    absent = [byte for letter, byte in ALPHABET.items() if letter not in model["vocab"]]
    if needed := sorted(byte for byte in absent if byte >= 0x20 and byte not in (0xC0, 0xC1) and byte < _RARE):
        yield (
            "model.vocab",
            f"lacks the byte 0x{needed[0]:02x}" + (f" and {len(needed) - 1} more" if needed[1:] else ""),
            "a token for each byte of text",
        )
    normalizer = file.get("normalizer")
    for each in normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]:
        if each is not None and each["type"] != "NFC":
            yield "normalizer", f"is {each['type']}", "NFC, or no normalizer"
    splitter = file.get("pre_tokenizer")
    steps = splitter["pretokenizers"] if splitter and splitter["type"] == "Sequence" else [splitter]
    for step in steps:
        yield from _step_problems(step)
    if not any(step and step["type"] == "ByteLevel" for step in steps):
        yield "pre_tokenizer", "has no ByteLevel", "byte-level BPE"
    if (decoder := file.get("decoder")) is None or decoder["type"] != "ByteLevel":
        yield "decoder", f"is {decoder and decoder['type']}", "ByteLevel"
    for token in file["added_tokens"]:
        if strange := [name for name in ("single_word", "lstrip", "rstrip") if token[name] and not token["special"]]:
            yield f"added token {token['content']!r}", f"has {strange[0]}", "a token without it"


def _step_problems(step: dict[str, Any] | None) -> Iterator[tuple[str, str, str]]:
    kind = step["type"] if step else None
    if step is None or kind not in ("ByteLevel", "Split", "Digits"):
        yield "pre_tokenizer", f"is {kind}", "ByteLevel, Split or Digits"
    elif kind == "ByteLevel" and step["add_prefix_space"]:
        yield "pre_tokenizer", "ByteLevel adds a space before a text", "add_prefix_space = false"
    elif kind == "Split":
        if step["behavior"] not in _SPLITS:
            yield "pre_tokenizer", f"Split is {step['behavior']}", " or ".join(_SPLITS)
        pattern = step["pattern"].get("Regex")
        if pattern is not None and _REGEX.fullmatch(pattern) is None:
            yield "pre_tokenizer", f"Split has the pattern {pattern}", "a pattern that JavaScript supports"
