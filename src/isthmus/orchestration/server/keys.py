"""`isthmus keys`: create, list and revoke API keys, or allow requests without one. Servers apply changes at once."""

from collections.abc import Sequence
from typing import Any

from isthmus.features import clock
from isthmus.features.errors import ConfigurationError, RequestError, one_of
from isthmus.features.files import write_atomically
from isthmus.orchestration.project import Project
from isthmus.serving.keys import Keyring, create_key, problems, required_marker


def create(project: Project, name: str, scopes: Sequence[str]) -> dict[str, Any]:
    """Create an API key and store only its hash. Return name, scopes and the key, which cannot be shown again.

    From then on, servers reject requests without a key. This stays so after all keys are revoked, until
    `allow_without_key` is called. Scopes are `read:SERVICE`, `push:VIEW`, `predict:MODEL` and `snapshot:SERVICE`, with
    `*` for any name. `snapshot:SERVICE/VALUE` allows only the snapshot of one owner. Raises a ConfigurationError for an
    invalid name or scope, and a RequestError if the name exists.
    """
    if wrong := problems(name, scopes):
        raise ConfigurationError("API key", wrong)
    with project.locked("keys"):
        ring = Keyring.read(project.keys_file)
        if any(key.name == name for key in ring.keys):
            raise RequestError(f"API key {name}", "already exists", remedy="revoke it first, or choose another name")
        key, secret = create_key(name, scopes, clock.now())
        ring = Keyring(keys=(*ring.keys, key))
        # Require keys before writing the key file, so that losing the file later does not open the server.
        required_marker(project.keys_file).touch()
        write_atomically(project.keys_file, ring.dumps(), mode=0o600)
    return {"name": key.name, "scopes": list(key.scopes), "key": secret}


def describe(project: Project) -> dict[str, Any]:
    keys = Keyring.read(project.keys_file).keys
    return {
        key.name: {"scopes": list(key.scopes), "created": clock.moment(key.created_at).isoformat(timespec="seconds")}
        for key in keys
    }


def revoke(project: Project, name: str) -> dict[str, Any]:
    """Remove the API key `name`. Return the name and the number of keys left.

    Servers reject the key from the next request on. If no key is left, servers reject every request until `create` or
    `allow_without_key` is called. Raises a RequestError if no key has the name.
    """
    with project.locked("keys"):
        ring = Keyring.read(project.keys_file)
        left = tuple(key for key in ring.keys if key.name != name)
        if len(left) == len(ring.keys):
            raise RequestError(f"API key {name}", "does not exist", expected=one_of(key.name for key in ring.keys))
        write_atomically(project.keys_file, Keyring(keys=left).dumps(), mode=0o600)
    report: dict[str, Any] = {"revoked": name, "left": len(left)}
    if not left:
        report["note"] = "no key is left, so every request is rejected; `isthmus keys open` opens servers on loopback"
    return report


def allow_without_key(project: Project) -> dict[str, Any]:
    """Let servers that listen on loopback answer requests without a key. Raise RequestError if a key still exists.

    Use it for development, after all keys are revoked. The setting `require_keys` overrides it.
    """
    with project.locked("keys"):
        ring = Keyring.read(project.keys_file)
        if ring.keys:
            names = ", ".join(key.name for key in ring.keys)
            raise RequestError("API keys", f"still valid: {names}", remedy="revoke them first")
        write_atomically(project.keys_file, Keyring(open=True).dumps(), mode=0o600)
    return {"open": "to every program on this machine, on loopback"}
