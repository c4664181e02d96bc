"""The settings of a server process: a frozen record, handed over as JSON."""

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
"""A check takes 0.15 to 0.35 ms, which is 1 % of the time of all lookups, and rarer than their p99."""

METRICS_FOLDER = "ISTHMUS_METRICS"
"""The variable with the folder in which workers that share a port share their counts."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a server.

    Attributes:
        contract: path of `contract.json`; the file may appear and change while the server runs.
        deployment: path of the deployment file; likewise.
        redis: URL of the online store, see `Address`.
        snapshots: folder of the snapshots for devices, by service; None to offer none.
        keys: path of the file of API keys; likewise. None for a server without keys: the API is open, so it listens on
            loopback only.
        require_keys: refuse every request while there is no key, on loopback, too.
        hosts: further names under which programs of this machine call a server without keys.
        check_share: of the requests whose rows' contents are compared with the hashes that they carry, 0 to 1.
        missing: how lookups answer rows that the online store has lost: "refuse" them with 503, or as null.
        host: address to listen on.
        port: port to listen on; 0 for any free one.
        workers: server processes that share the port.
        limits: of a worker.
        batch: rows of several requests that a slow model predicts together.
        public_key: whose owner must have signed every package that is deployed, as PEM; None if nobody must.
        latency: folder where it writes its latency for a training beside it; None to write nothing.
        latency_objective_ms: the objective for the p99 of its answers.
        freshness_objective_seconds: view name to the age that its newest row may have.
        history_seconds: within what time pushed rows shall be in the history of their view.
        record: what is recorded of its answers; None for nothing.
        spool: folder of what is recorded, until it is collected.
        spool_key: with which keys of private views are hashed, in hex.
        now: the present time in microseconds since 1970 UTC for projects that replay history; None for the clock.
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
            problems += self._open_to_others()
        try:
            Address.of(self.redis)
        except ValueError:
            # The parser quotes the URL, and with it the password.
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
        """Whether the address can be reached from this machine alone."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def _open_to_others(self) -> list[Problem]:
        """What must be done before the server listens to the network."""
        try:
            if self.keys is not None and Keyring.read(Path(self.keys)).keys:
                return []
            why = "there is no API key"
        except DataError as error:
            why = str(error)
        problem = f"{self.host!r} is open to other machines, and {why}"
        expected = "127.0.0.1, ::1 or localhost, or a key of `isthmus keys create NAME --scope 'read:*'`"
        return [Problem("host", problem, expected)]

    @classmethod
    def from_environment(cls) -> "ServerSettings":
        """The settings of a process that a fleet has started. Its own children do not see them."""
        text = os.environ.pop(VARIABLE, None)
        if text is None:
            problem = Problem(VARIABLE, "is not set", "the server's settings as JSON")
            raise ConfigurationError("server", [problem], remedy="start the server with `isthmus serve`")
        return cls.decode(text, VARIABLE)

    @classmethod
    def decode(cls, text: str | bytes, where: str) -> "ServerSettings":
        """The settings in JSON from somewhere."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigurationError("server", [Problem(where, str(error), "the server's settings")]) from error
