"""The readers of heads in other languages: sources that a package ships to whoever builds an app."""

from pathlib import Path

FOLDER = Path(__file__).parent / "clients"
BROWSER = "head.mjs"
READERS = {
    BROWSER: "what feeds a numeric core, in a browser or in Node",
    "Head.kt": "what feeds a numeric core, on Android",
    "Head.swift": "what feeds a numeric core, on iOS and macOS",
}
"""File to its purpose."""


def sources() -> dict[str, bytes]:
    """The files by name."""
    return {name: (FOLDER / name).read_bytes() for name in READERS}
