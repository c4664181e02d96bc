"""What reads heads, snapshots and tokenizers in other languages: sources that a package ships for apps."""

from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
READER, CLIENT = "head.mjs", "snapshot.mjs"
"""Those of browsers."""
READERS = {
    READER: "what feeds a numeric core, in a browser or in Node",
    "Head.kt": "what feeds a numeric core, on Android",
    "Head.swift": "what feeds a numeric core, on iOS and macOS",
}
"""Of heads: file to its purpose."""
CLIENTS = {
    CLIENT: "the stored features in a browser",
    "Snapshots.kt": "the stored features on Android",
    "Snapshots.swift": "the stored features on iOS and macOS",
}
"""Of snapshots: file to its purpose."""
GENERATORS = {
    "tokenizer.mjs": "the tokenizer in a browser or in Node",
    "generate.mjs": "what generates text, in a browser or in Node",
}
"""Of causal language models: file to its purpose."""

PREDICTORS = ("predictor.mjs", "Predictor.kt", "Predictor.swift")
"""Predictions from keys and request fields; READMEs contain them."""


def sources(names: Iterable[str]) -> dict[str, bytes]:
    """The files by name."""
    return {name: (FOLDER / name).read_bytes() for name in names}
