"""Sources in JavaScript, Kotlin and Swift that packages ship for apps."""

from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
READER, CLIENT = "head.mjs", "snapshot.mjs"
"""Files for browsers."""
READERS = {
    READER: "what feeds a numeric core, in a browser or in Node",
    "Head.kt": "what feeds a numeric core, on Android",
    "Head.swift": "what feeds a numeric core, on iOS and macOS",
}
"""Readers of heads: file to its purpose."""
CLIENTS = {
    CLIENT: "the stored features in a browser",
    "Snapshots.kt": "the stored features on Android",
    "Snapshots.swift": "the stored features on iOS and macOS",
}
"""Clients of snapshots: file to its purpose."""
GENERATORS = {
    "tokenizer.mjs": "the tokenizer in a browser or in Node",
    "generate.mjs": "what generates text, in a browser or in Node",
}
"""Text generation: file to its purpose."""

PREDICTORS = ("predictor.mjs", "Predictor.kt", "Predictor.swift")
"""Predictions from keys and request fields; included in READMEs."""


def sources(names: Iterable[str]) -> dict[str, bytes]:
    return {name: (FOLDER / name).read_bytes() for name in names}
