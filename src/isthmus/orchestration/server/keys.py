"""`keys create`, `keys list` and `keys revoke`: who may ask the API. A running server follows at once."""

from collections.abc import Sequence
from typing import Any

from isthmus.features import clock
from isthmus.features.errors import ConfigurationError, RequestError, one_of
from isthmus.features.files import write_atomically
from isthmus.orchestration.project import Project
from isthmus.serving.keys import Keyring, make, problems, required


def create(project: Project, name: str, scopes: Sequence[str]) -> dict[str, Any]:
    """Creates a key and stores its hash; returns its description with the key itself, which is stored nowhere.

    Scopes are `read:SERVICE`, `push:VIEW`, `predict:MODEL`, `snapshot:SERVICE`, or `*` for the name, and of the
    snapshot of an owner `snapshot:SERVICE/VALUE`.

    Raises:
        ConfigurationError: the name or a scope is invalid.
        RequestError: there is a key of this name.
        DataError: the key file is broken.
    """
    if wrong := problems(name, scopes):
        raise ConfigurationError("API key", wrong)
    with project.locked("keys"):
        ring = Keyring.read(project.keys_file)
        if any(key.name == name for key in ring.keys):
            raise RequestError(f"API key {name}", "is there already", remedy="revoke it first, or choose another name")
        key, secret = make(name, scopes, clock.now())
        ring = Keyring(keys=(*ring.keys, key))
        # First: from here on, a key file that is lost opens nothing.
        required(project.keys_file).touch()
        write_atomically(project.keys_file, ring.dumps(), mode=0o600)
    return {"name": key.name, "scopes": list(key.scopes), "key": secret}


def describe(project: Project) -> dict[str, Any]:
    """Every key by its name: its scopes, and when it was created."""
    keys = Keyring.read(project.keys_file).keys
    return {
        key.name: {"scopes": list(key.scopes), "created": clock.moment(key.created_at).isoformat(timespec="seconds")}
        for key in keys
    }


def revoke(project: Project, name: str) -> dict[str, Any]:
    """Removes a key: from its next request on it is not known. RequestError if there is no key of this name."""
    with project.locked("keys"):
        ring = Keyring.read(project.keys_file)
        left = tuple(key for key in ring.keys if key.name != name)
        if len(left) == len(ring.keys):
            raise RequestError(f"API key {name}", "is not there", expected=one_of(key.name for key in ring.keys))
        write_atomically(project.keys_file, Keyring(keys=left).dumps(), mode=0o600)
    report: dict[str, Any] = {"revoked": name, "left": len(left)}
    if not left:
        report["note"] = "without any key, every request is refused; `isthmus keys open` opens a server on loopback"
    return report


def open_to_all(project: Project) -> dict[str, Any]:
    """Lets every program of this machine ask a server on loopback, as before the first key.

    Raises:
        RequestError: there are keys left.
        DataError: the key file is broken.
    """
    with project.locked("keys"):
        ring = Keyring.read(project.keys_file)
        if ring.keys:
            names = ", ".join(key.name for key in ring.keys)
            raise RequestError("API keys", f"{names} are valid", expected="none", remedy="revoke them first")
        write_atomically(project.keys_file, Keyring(open=True).dumps(), mode=0o600)
    return {"open": "to every program of this machine, on loopback"}
