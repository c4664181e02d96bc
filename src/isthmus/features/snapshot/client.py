"""The reference clients of snapshots: sources that a package ships to whoever builds an app."""

from pathlib import Path

FOLDER = Path(__file__).parent / "clients"
BROWSER = "snapshot.mjs"
CLIENTS = {
    BROWSER: "the stored features in a browser",
    "Snapshots.kt": "the stored features on Android",
    "Snapshots.swift": "the stored features on iOS and macOS",
}
"""File to its purpose."""


def sources() -> dict[str, bytes]:
    """The files by name."""
    return {name: (FOLDER / name).read_bytes() for name in CLIENTS}
