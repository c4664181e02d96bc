"""Settings of a server process, passed to it as JSON."""

import ipaddress
import os
from pathlib import Path
from typing import Literal

import msgspec

from isthmus.features.errors import ConfigurationError, DataError, Problem
from isthmus.features.profiles import BATCH_ROWS, OBJECTIVE_MS
from isthmus.features.redis.address import SCHEMES, Address, without_credentials
from isthmus.serving.keys import Keyring
from isthmus.serving.limits import Limits
from isthmus.serving.recorder.options import Recording

VARIABLE = "ISTHMUS_SERVER"

CHECK_SHARE = 1 / 128
"""Default fraction of requests whose row contents are checked.

A check takes 0.15 to 0.35 ms. At this share it uses 1 % of all lookup time and does not affect the p99.
"""

METRICS_FOLDER = "ISTHMUS_METRICS"
"""Environment variable with the folder in which workers of a shared port share their counts."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a server; a ConfigurationError lists all invalid ones, such as a network host without any API key.

    Attributes:
        contract: path of `contract.json`; the file may appear and change while the server runs.
        deployment: path of the deployment file; it may appear and change too.
        redis: URL of the online store, see `Address`.
        snapshots: folder of device snapshots, by service; None to offer none.
        keys: path of the file of API keys, which may appear and change too; None for a server on loopback only.
        require_keys: refuse every request while no key exists, even on loopback.
        hosts: additional host names that local programs use to call a server without keys.
        check_share: fraction of requests whose row contents are checked against their hashes, 0 to 1.
        missing: answer for rows the online store has lost: "refuse" (503) or "null".
        port: port to listen on; 0 for any free port.
        workers: number of server processes that share the port.
        batch: rows of several requests that a slow model predicts together.
        public_key: PEM key that every deployed package must be signed with, or None.
        latency: folder for latency files, read by training on the same machine; None to write none.
        latency_objective_ms: objective for the p99 of answers.
        freshness_objective_seconds: maximum age of the newest row, by view name.
        history_seconds: time in which pushed rows should reach the history of their view.
        record: answers to record; None to record nothing.
        spool: folder of recorded answers until they are collected; required with `record`.
        spool_key: secret for hashing join keys of private views, 32 to 128 hex digits if there are any.
        now: fixed time in microseconds since 1970 UTC for projects that replay history; None for the clock.
    """

    contract: str
    deployment: str
    redis: str
    snapshots: str | None = None
    keys: str | None = None
    require_keys: bool = False
    hosts: tuple[str, ...] = ()
    check_share: float = CHECK_SHARE
    missing: Literal["refuse", "null"] = "refuse"
    host: str = "127.0.0.1"
    port: int = 6570
    workers: int = 1
    limits: Limits = Limits()
    batch: int = BATCH_ROWS
    public_key: str | None = None
    latency: str | None = None
    latency_objective_ms: float = OBJECTIVE_MS
    freshness_objective_seconds: dict[str, float] = {}
    history_seconds: float = 60.0
    record: Recording | None = None
    spool: str | None = None
    spool_key: str = ""
    now: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not self.loopback:
            problems += self._network_problems()
        try:
            Address.of(self.redis)
        except ValueError:
            # The parser's message quotes the URL, including the password.
            shown = without_credentials(self.redis)
            accepted = f"{', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}"
            problems.append(Problem("redis", f"{shown!r} is not the URL of a Redis", accepted))
        if not 0 <= self.port <= 65535:
            problems.append(Problem("port", str(self.port), "0 to 65535"))
        if self.workers < 1:
            problems.append(Problem("workers", str(self.workers), "1 or more"))
        if self.batch < 1:
            problems.append(Problem("batch", str(self.batch), "1 or more"))
        if self.record is not None and self.spool is None:
            problems.append(Problem("spool", "is missing", "the folder that `record` writes to"))
        if self.record is not None and self.record.private and not 16 <= len(self.spool_key) // 2 <= 64:
            problems.append(Problem("spool_key", f"has {len(self.spool_key)} digits", "32 to 128, for private views"))
        if problems:
            raise ConfigurationError("server", problems)

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def _network_problems(self) -> list[Problem]:
        try:
            if self.keys is not None and Keyring.read(Path(self.keys)).keys:
                return []
            why = "there are no API keys"
        except DataError as error:
            why = str(error)
        problem = f"{self.host!r} can be reached from other machines, but {why}"
        expected = "127.0.0.1, ::1 or localhost, or a key of `isthmus keys create NAME --scope 'read:*'`"
        return [Problem("host", problem, expected)]

    @classmethod
    def from_environment(cls) -> "ServerSettings":
        """Read the settings of a server in a container from `ISTHMUS_SERVER`, an environment variable with JSON.

        Removes the variable from the environment, because it may hold the Redis password. Raises a ConfigurationError
        if it is missing or invalid.
        """
        text = os.environ.pop(VARIABLE, None)
        if text is None:
            problem = Problem(VARIABLE, "is not set", "the server's settings as JSON")
            raise ConfigurationError("server", [problem], remedy="start the server with `isthmus serve`")
        return cls.decode(text, VARIABLE)

    @classmethod
    def decode(cls, text: str | bytes, where: str) -> "ServerSettings":
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigurationError("server", [Problem(where, str(error), "the server's settings")]) from error
