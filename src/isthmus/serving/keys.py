"""API keys and their scopes. The server stores only hashes of keys."""

import hmac
import os
import re
import secrets
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, unquote

import msgspec

from isthmus.features.errors import DataError, Problem
from isthmus.serving.wire.errors import ForbiddenError

PREFIX = "isthmus_"
"""Prefix of every key, so that secret scanners find leaked keys in repositories and logs."""

PATTERN = re.compile(rb"isthmus_[A-Za-z0-9_-]{43}")
ACTIONS = ("read", "push", "predict", "snapshot", "status")

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCOPE = re.compile(rf"({'|'.join(ACTIONS[:-1])}):(\*|[^\s:*/]+)|snapshot:[^\s:*/]+/[^\s:*]+|status:\*")


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stored key.

    Attributes:
        name: name of the key; logged, unlike the key itself.
        sha256: SHA-256 of the key, in hexadecimal. A fast hash is safe: no one can guess 32 random bytes.
        scopes: `action:name` or `action:*`; `snapshot:service/value` for the snapshot of one owner.
        created_at: microseconds since 1970 UTC.
    """

    name: str
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    scopes: tuple[str, ...]
    created_at: int


class Grants(msgspec.Struct, frozen=True):
    """Permissions of a request: the name of its key, empty if the server requires no key, and its scopes."""

    name: str
    scopes: frozenset[str]

    def require(self, action: str, name: str) -> None:
        own = f"{action}:{name}"
        if own not in self.scopes and f"{action}:*" not in self.scopes:
            raise self._lacks(own, f"{own} or {action}:*")

    def require_status(self, model: str | None = None) -> None:
        open_to = {"status:*", "read:*"} | (set() if model is None else {f"predict:{model}", "predict:*"})
        if not self.scopes & open_to:
            raise self._lacks("status:*", " or ".join(sorted(open_to)), shown="'status:*'")

    def require_owner(self, service: str, text: str) -> None:
        own = f"snapshot:{service}/{quote(text, safe='')}"
        if self.scopes.isdisjoint((own, f"snapshot:{service}", "snapshot:*")):
            raise self._lacks(own, f"{own}, snapshot:{service} or snapshot:*")

    def require_lookup(self, service: str | None, features: Sequence[str] | None) -> None:
        if features is None and service is not None:
            self.require("read", service)
        elif "read:*" not in self.scopes:
            raise ForbiddenError(
                f"API key {self.name}", "lacks the scope read:*, which a lookup by `features` needs",
                expected="read:*", remedy="use feature_service instead, or create a key with `--scope read:*`",
            )  # fmt: skip

    def _lacks(self, scope: str, expected: str, shown: str = "") -> ForbiddenError:
        return ForbiddenError(
            f"API key {self.name}", f"lacks the scope {scope}", expected=expected,
            remedy=f"create a key with `isthmus keys create NAME --scope {shown or scope}`",
        )  # fmt: skip


EVERYTHING = Grants("", frozenset(f"{action}:*" for action in ACTIONS))
"""Grants of every request to a server without keys."""


class Keyring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key file. `open` is True if the operator chose to run without keys; only loopback is served then."""

    format_version: int = _FORMAT
    keys: tuple[Key, ...] = ()
    open: bool | msgspec.UnsetType = msgspec.UNSET

    def dumps(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def read(cls, path: Path) -> "Keyring":
        """Read the API keys of a project from its key file. Return an empty keyring if the file is missing.

        Raises DataError if the file is invalid, or if users other than the current user and root own it or may write
        it.
        """
        try:
            return cls.checked(path.read_bytes(), str(path))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise DataError(str(path), f"cannot be read ({error.strerror})") from error

    @classmethod
    def checked(cls, text: bytes, where: str) -> "Keyring":
        try:
            status = Path(where).stat()
        except OSError as error:
            raise DataError(where, f"cannot be read ({error.strerror})") from error
        if status.st_uid not in (0, os.geteuid()):
            raise DataError(where, f"belongs to user {status.st_uid}", expected=f"user {os.geteuid()} or root",
                            remedy=f"chown {os.geteuid()} it, if it is yours")  # fmt: skip
        if status.st_mode & 0o022:
            raise DataError(where, f"is writable by other users (mode {status.st_mode & 0o777:o})", expected="mode 600",
                                remedy="chmod 600 it, if its keys are still yours")  # fmt: skip
        return cls.loads(text, where)

    @classmethod
    def loads(cls, text: bytes, where: str) -> "Keyring":
        remedy = "restore it, or remove it and create the keys again"
        try:
            ring = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(where, f"is not a file of API keys ({error})", remedy=remedy) from error
        if ring.format_version != _FORMAT:
            raise DataError(where, f"has format {ring.format_version}", expected=str(_FORMAT), remedy=remedy)
        return ring

    def find(self, presented: bytes) -> Key | None:
        digest = sha256(presented).hexdigest()
        matches = [key for key in self.keys if hmac.compare_digest(key.sha256, digest)]
        return matches[-1] if matches else None


def required_marker(keys: Path) -> Path:
    """Return the path of the marker, a file next to the key file `keys` that makes API keys required while it exists.

    `isthmus keys create` writes the marker. Requests then need a key even if the key file is missing or empty, and only
    `isthmus keys open` allows requests without a key again. This function creates nothing.
    """
    return keys.with_name("keys.required")


def create_key(name: str, scopes: Sequence[str], created_at: int) -> tuple[Key, str]:
    """Create a random API key; return its record for the key file, and the secret for the user. Stores neither.

    `scopes` are permissions such as "read:SERVICE". `created_at` is the time of creation in microseconds since 1970
    UTC.
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    return Key(name, sha256(secret.encode()).hexdigest(), tuple(dict.fromkeys(scopes)), created_at), secret


def problems(name: str, scopes: Sequence[str]) -> list[Problem]:
    wrong = []
    if not _NAME.fullmatch(name):
        wrong.append(Problem("name", repr(name), "letters, digits, ., _ and -, a letter or digit first, 64 at most"))
    if not scopes:
        wrong.append(Problem("scope", "is missing", "at least one"))
    expected = "read:SERVICE, push:VIEW, predict:MODEL, snapshot:SERVICE, snapshot:SERVICE/VALUE, or * for the name"
    expected += "; status:*"
    for scope in scopes:
        service, _, value = scope.partition("/")
        encoded = quote(unquote(value), safe="")
        if not _SCOPE.fullmatch(scope):
            wrong.append(Problem("scope", repr(scope), expected))
        elif value != encoded:
            wrong.append(Problem("scope", repr(scope), f"{service}/{encoded}, as in the path of the API"))
    return wrong
