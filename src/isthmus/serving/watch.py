"""Takes up a new contract or a new deployment while the server runs."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from isthmus.features import clock
from isthmus.features.contract.contract import Contract
from isthmus.features.errors import DataError, IsthmusError
from isthmus.features.files import write_atomically
from isthmus.features.profiles import BATCH_ROWS
from isthmus.serving.deployment.deployment import Candidate, Deployment
from isthmus.serving.log import place
from isthmus.serving.predict.model import Model
from isthmus.serving.rollout.candidate import Decision, Trial, decided, decision_file
from isthmus.serving.state import State
from isthmus.serving.watchedfile import File

POLL_SECONDS = 0.5


class Watch:
    """The state of a server, kept up with two files, and with what its workers decide about a candidate.

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
        self._deployment = File(deployment, self._loaded)
        self._decision = File(decision_file(deployment), _decision)
        self._told: Trial | None = None
        self._public_key = public_key
        self._batch = batch
        self.state = State(batch=batch)
        self._before: Contract | None = None

    def load(self) -> None:
        """Reads what has changed, and replaces the state if something has."""
        changed = [file for file in self._files if file.changed()]
        contract = self._contract.content
        for file in changed:
            file.load()
        if isinstance(contract, Contract) and self._contract.content != contract:
            self._before = contract
        if changed:
            found = self._deployment.content
            model, trial = (found.model, found.trial) if isinstance(found, _Deployed) else (found, None)
            decision = self._decision.content
            if trial is not None and isinstance(decision, Decision) and decision.about(trial.candidate):
                trial.refused = decision.why
            state = State(
                self._contract.content, model, self._deployment.problem, self._before, trial, batch=self._batch
            )
            if state.outdated is not None:
                structlog.get_logger().warning("model refused", problem=str(state.outdated))
            # Compiled here, and not while a request waits.
            state.candidate  # noqa: B018
            self.state = state

    async def run(self) -> None:
        """Follows the files until it is canceled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            trial = self.state.trial
            if trial is not None and trial.refused is not None and trial is not self._told:
                await asyncio.to_thread(self._tell, trial, trial.refused)
            if any(file.changed() for file in self._files):
                # A model takes a while to load, and the event loop has requests to answer.
                try:
                    await asyncio.to_thread(self.load)
                except Exception as error:  # noqa: BLE001 - a defect, and the next change may be without it
                    structlog.get_logger().warning("reload failed", exception=type(error).__name__, at=place(error))

    @property
    def _files(self) -> "tuple[File[Contract], File[_Deployed], File[Decision]]":
        return self._contract, self._deployment, self._decision

    def _loaded(self, path: Path) -> "_Deployed":
        deployment = Deployment.loads(_read(path), str(path))
        candidate = deployment.candidate
        deployment = msgspec.structs.replace(deployment, candidate=None)
        before = self._deployment.content
        trial = candidate or (isinstance(before, _Deployed) and before.trial)
        if isinstance(before, _Deployed) and before.model.deployment == deployment and trial:
            # It is the candidate that has changed.
            model = before.model
        else:
            model = Model(deployment, self._public_key)
        return _Deployed(model, None if candidate is None else self._tried(candidate))

    def _tried(self, candidate: Candidate) -> Trial:
        try:
            return Trial(candidate, Model(candidate.deployment, self._public_key))
        except IsthmusError as error:
            structlog.get_logger().warning("candidate refused", problem=str(error))
            return Trial(candidate, error)

    def _tell(self, trial: Trial, why: str) -> None:
        """Writes down that a candidate was given up here, once, for the other workers and for who asks later."""
        self._told = trial
        if decided(self._deployment.path, trial.candidate) is not None:
            return
        deployment = trial.candidate.deployment
        log = structlog.get_logger()
        log.warning("candidate given up", package=deployment.digest, problem=why)
        decision = Decision(deployment.digest, deployment.deployed_at, clock.now(), why)
        try:
            write_atomically(decision_file(self._deployment.path), decision.dumps())
        except OSError as error:
            log.warning("decision not written", problem=error.strerror or str(error))


@dataclass(frozen=True)
class _Deployed:
    """What a deployment file stands for: its model, and what is tried beside it."""

    model: Model
    trial: Trial | None


def _contract(path: Path) -> Contract:
    return Contract.loads(_read(path), str(path))


def _decision(path: Path) -> Decision:
    return Decision.loads(_read(path), str(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(str(path), f"cannot be read ({error.strerror})") from error
