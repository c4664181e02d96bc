"""API keys: who may do what. The server knows only their hashes."""

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
"""What every key begins with: scanners of repositories and logs find a leaked key by it."""

PATTERN = re.compile(rb"isthmus_[A-Za-z0-9_-]{43}")
ACTIONS = ("read", "push", "predict", "snapshot", "status")

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCOPE = re.compile(rf"({'|'.join(ACTIONS[:-1])}):(\*|[^\s:*/]+)|snapshot:[^\s:*/]+/[^\s:*]+|status:\*")


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key as it is stored.

    Attributes:
        name: whose it is; it is logged, the key never is.
        sha256: SHA-256 of the key, in hexadecimal. A password would need a slow, salted hash because it can be guessed.
            A key is 32 random bytes: with 2^256 of them there is nothing to try, so a fast hash loses nothing, and
            checking one costs each request a microsecond.
        scopes: `action:name` or `action:*`; of the snapshot of an owner `snapshot:service/value`.
        created_at: microseconds since 1970 UTC.
    """

    name: str
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    scopes: tuple[str, ...]
    created_at: int


class Grants(msgspec.Struct, frozen=True):
    """What a request may do: the name of its key, empty where the API demands none, and scopes as a key has them."""

    name: str
    scopes: frozenset[str]

    def require(self, action: str, name: str) -> None:
        """Refuses what the key has no scope for."""
        if f"{action}:{name}" not in self.scopes and f"{action}:*" not in self.scopes:
            raise ForbiddenError(
                f"API key {self.name}", f"lacks the scope {action}:{name}", expected=f"{action}:{name} or {action}:*",
                remedy=f"create a key with `isthmus keys create NAME --scope {action}:{name}`",
            )  # fmt: skip

    def require_status(self, model: str | None = None) -> None:
        """Refuse a key that may not see the server's status, or that may not see the status of this model.

        A `read:*` key may also see the status: such keys were made for Prometheus before `status:*` existed.
        """
        open_to = {"status:*", "read:*"} | (set() if model is None else {f"predict:{model}", "predict:*"})
        if not self.scopes & open_to:
            raise ForbiddenError(
                f"API key {self.name}", "lacks the scope status:*", expected=" or ".join(sorted(open_to)),
                remedy="create a key with `isthmus keys create NAME --scope 'status:*'`",
            )  # fmt: skip

    def require_owner(self, service: str, text: str) -> None:
        """Refuses an owner's snapshot that the key has no scope for; `text` is the owner's value as in its header."""
        own = f"snapshot:{service}/{quote(text, safe='')}"
        if not self.scopes.intersection((own, f"snapshot:{service}", "snapshot:*")):
            raise ForbiddenError(
                f"API key {self.name}", f"lacks the scope {own}", expected=f"{own}, snapshot:{service} or snapshot:*",
                remedy=f"create a key with `isthmus keys create NAME --scope {own}`",
            )  # fmt: skip

    def require_lookup(self, service: str | None, features: Sequence[str] | None) -> None:
        """Refuses a lookup that the key has no scope for: a list of features may name any."""
        if features is None and service is not None:
            self.require("read", service)
        elif "read:*" not in self.scopes:
            raise ForbiddenError(
                f"API key {self.name}", "lacks the scope read:*, which a lookup by `features` needs",
                expected="read:*", remedy="ask by feature_service, or create a key with `--scope read:*`",
            )  # fmt: skip


EVERYTHING = Grants("", frozenset(f"{action}:*" for action in ACTIONS))
"""What a request may do where the API demands no key."""


class Keyring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key file: every key that is valid; without any, `open` lets everybody on loopback in, on purpose."""

    format_version: int = _FORMAT
    keys: tuple[Key, ...] = ()
    open: bool | msgspec.UnsetType = msgspec.UNSET

    def dumps(self) -> bytes:
        """The keys as a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def read(cls, path: Path) -> "Keyring":
        """The keys of a file; none if there is no such file.

        Raises:
            DataError: the file cannot be read, or is no key file.
        """
        try:
            return cls.checked(path.read_bytes(), str(path))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise DataError(str(path), f"cannot be read ({error.strerror})") from error

    @classmethod
    def checked(cls, text: bytes, where: str) -> "Keyring":
        """The keys of a file that nobody else may write.

        Raises:
            DataError: others may write it, it is no key file, or it is gone again.
        """
        try:
            status = Path(where).stat()
        except OSError as error:
            raise DataError(where, f"cannot be read ({error.strerror})") from error
        if status.st_uid not in (0, os.geteuid()):
            raise DataError(where, f"belongs to user {status.st_uid}", expected=f"user {os.geteuid()} or root",
                            remedy=f"chown {os.geteuid()} it, if it is yours")  # fmt: skip
        if status.st_mode & 0o022:
            raise DataError(where, f"may be written by others (mode {status.st_mode & 0o777:o})", expected="mode 600",
                            remedy="chmod 600 it, if its keys are still yours")  # fmt: skip
        return cls.loads(text, where)

    @classmethod
    def loads(cls, text: bytes, where: str) -> "Keyring":
        """The inverse of `dumps`."""
        remedy = "restore it, or remove it and create the keys again"
        try:
            ring = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(where, f"is no file of API keys ({error})", remedy=remedy) from error
        if ring.format_version != _FORMAT:
            raise DataError(where, f"has format {ring.format_version}", expected=str(_FORMAT), remedy=remedy)
        return ring

    def find(self, presented: bytes) -> Key | None:
        """The stored key that matches a presented key.

        Every stored hash is compared, each in constant time: how long the answer takes reveals nothing about the keys.
        """
        digest = sha256(presented).hexdigest()
        matches = [key for key in self.keys if hmac.compare_digest(key.sha256, digest)]
        return matches[-1] if matches else None


def required(keys: Path) -> Path:
    """The file that says that there have been keys: without any, nothing is open as long as it is there."""
    return keys.with_name("keys.required")


def make(name: str, scopes: Sequence[str], at: int) -> tuple[Key, str]:
    """A new key: as it is stored, and its secret, which nobody can read again."""
    secret = PREFIX + secrets.token_urlsafe(32)
    return Key(name, sha256(secret.encode()).hexdigest(), tuple(dict.fromkeys(scopes)), at), secret


def problems(name: str, scopes: Sequence[str]) -> list[Problem]:
    """What is wrong with the name and the scopes of a new key."""
    wrong = []
    if not _NAME.fullmatch(name):
        wrong.append(Problem("name", repr(name), "letters, digits, ., _ and -, a letter or digit first, 64 at most"))
    if not scopes:
        wrong.append(Problem("scope", "there is none", "at least one"))
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
