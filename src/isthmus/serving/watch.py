"""Takes up a new contract or a new deployment while the server runs."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from isthmus.features.contract import Contract
from isthmus.features.errors import DataError, IsthmusError
from isthmus.features.profiles import BATCH_ROWS
from isthmus.serving.deployment import Deployment
from isthmus.serving.log import place
from isthmus.serving.model import Model
from isthmus.serving.state import State

POLL_SECONDS = 0.5

T = TypeVar("T")


class Watch:
    """The state of a server, kept up with two files.

    Args:
        contract: the one file.
        deployment: the other.
        public_key: whose owner must have signed what is deployed, as PEM; None if nobody must.
        batch: rows of several requests that are predicted together.

    Attributes:
        state: what to answer from. A request takes it once and keeps it: the next state is another object.
    """

    def __init__(
        self, contract: Path, deployment: Path, public_key: str | None = None, batch: int = BATCH_ROWS
    ) -> None:
        self._contract = File(contract, _contract)
        self._deployment = File(deployment, partial(_model, public_key))
        self._batch = batch
        self.state = State(batch=batch)
        self._before: Contract | None = None

    def load(self) -> None:
        """Reads what has changed, and replaces the state if something has."""
        changed = [file for file in (self._contract, self._deployment) if file.changed()]
        contract = self._contract.content
        for file in changed:
            file.load()
        if isinstance(contract, Contract) and self._contract.content != contract:
            self._before = contract
        if changed:
            state = State(self._contract.content, self._deployment.content, self._deployment.problem, self._before,
                          self._batch)  # fmt: skip
            if state.outdated is not None:
                structlog.get_logger().warning("model refused", problem=str(state.outdated))
            self.state = state

    async def run(self) -> None:
        """Follows the files until it is canceled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._contract.changed() or self._deployment.changed():
                # A model takes a while to load, and the event loop has requests to answer.
                try:
                    await asyncio.to_thread(self.load)
                except Exception as error:  # noqa: BLE001 - a defect, and the next change may be without it
                    structlog.get_logger().warning("reload failed", exception=type(error).__name__, at=place(error))


class File(Generic[T]):
    """A file and what it holds: its content, or what is wrong with it, or None if there is no such file.

    A broken file does not replace a good one: `content` stays, and `problem` says what is wrong with the file.
    """

    def __init__(self, path: Path, parse: Callable[[Path], T]) -> None:
        self._path = path
        self._parse = parse
        self._stamp: tuple[int, int, int] | None = None
        self.content: T | IsthmusError | None = None
        self.problem: IsthmusError | None = None

    def changed(self) -> bool:
        """Whether it is another file than the one that was read last."""
        return _stamp(self._path) != self._stamp

    def load(self) -> None:
        """Reads the file."""
        log = structlog.get_logger()
        # Taken first: a file that changes while it is read is read again.
        self._stamp = _stamp(self._path)
        if self._stamp is None:
            log.warning("file is gone", path=str(self._path))
            self.content = self.problem = None
            return
        try:
            self.content, self.problem = self._parse(self._path), None
        except IsthmusError as error:
            kept = self.content is not None and not isinstance(self.content, IsthmusError)
            log.warning("file refused", path=str(self._path), problem=str(error), previous="kept" if kept else "none")
            self.problem = error
            if not kept:
                self.content = error
            return
        log.info("file loaded", path=str(self._path))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file; None only if it is certain that there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return 0, 0, -(error.errno or 1)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _contract(path: Path) -> Contract:
    return Contract.loads(_read(path), str(path))


def _model(public_key: str | None, path: Path) -> Model:
    return Model(Deployment.loads(_read(path), str(path)), public_key)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(str(path), f"cannot be read ({error.strerror})") from error
