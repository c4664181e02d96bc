"""Loads a new contract or a new deployment while the server runs."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features import clock
from isthmus.features.contract.generations import NEXT, RETIRED, Generations, loads_retired
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import IsthmusError
from isthmus.features.files import write_atomically
from isthmus.features.online import loss
from isthmus.features.profiles import BATCH_ROWS
from isthmus.serving import log
from isthmus.serving.deployment.record import Candidate, Deployment
from isthmus.serving.predict.model import Model
from isthmus.serving.rollout.candidate import CandidateRun
from isthmus.serving.rollout.decision import Decision, decision_file, read_decision
from isthmus.serving.rollout.probation import ProbationRun
from isthmus.serving.rollout.releases import undo
from isthmus.serving.state import State
from isthmus.serving.watchedfile import WatchedFile

POLL_SECONDS = 0.025
"""Between two looks at the files, where a look takes microseconds, as on a disk of this machine."""

SLOWEST_POLL_SECONDS = 0.5
"""Between two looks, wherever the files are."""

_SHARE = 0.02
"""Of the time that is spent on looking, at most: on a network file system a look may take milliseconds."""


class Watch:
    """Follows the contracts, the deployment, and the decisions of the workers about a candidate or the deployment.

    A request reads `state` once: the next state is a new object.
    """

    def __init__(
        self, contract: Path, deployment: Path, public_key: str | None = None, batch: int = BATCH_ROWS
    ) -> None:
        self._contract = WatchedFile(contract, Contract.loads)
        self._next = WatchedFile(contract.with_name(NEXT), Contract.loads)
        self._retired = WatchedFile(contract.with_name(RETIRED), loads_retired)
        self._deployment = WatchedFile(deployment, self._loaded)
        self._written = WatchedFile(contract.with_name(loss.FILE), loss.loads)
        self._decision = WatchedFile(decision_file(deployment), Decision.loads)
        self._reported: CandidateRun | ProbationRun | None = None
        self._undecided: Deployment | None = None
        self._retry = 0.0
        self._public_key = public_key
        self._batch = batch
        self.state = State(batch=batch)

    @property
    def written(self) -> loss.LastMaterializations:
        """Return the materializations that the file records."""
        content = self._written.content
        return content if isinstance(content, dict) else {}

    def load(self) -> None:
        """Reads what has changed, and replaces the state if something has."""
        loaded = False
        if self._written.changed():
            self._written.load()  # The state does not include it.
        for file in self._files:
            if file.changed():
                file.load()
                loaded = True
        if loaded:
            self.state = self._compiled()

    def _compiled(self) -> State:
        """The state by the files as they were read last."""
        deployed, decision = self._deployment.content, self._decision.content
        loaded = deployed if isinstance(deployed, _Deployed) else _Deployed(deployed)
        run = loaded.trial
        if run is not None and isinstance(decision, Decision) and decision.about(run.deployment):
            run.refused = decision.why
        current, following, retired = self._contract.content, self._next.content, self._retired.content
        generations = Generations(
            current if isinstance(current, Contract) else None,
            following if isinstance(following, Contract) else None,
            retired if isinstance(retired, tuple) else (),
        )
        problem = current if isinstance(current, IsthmusError) else None
        state = State(generations, problem, loaded.model, self._deployment.problem, run, self._batch)
        if state.outdated is not None:
            log.warning("model refused", problem=str(state.outdated))
        # Compiled here, and not while a request waits.
        if state.candidate is None and state.former is None and state.probation is not None:
            log.warning("no way back from the deployment", problem=state.probation.problem)
        return state

    async def run(self) -> None:
        """Follows the files until it is canceled."""
        pause = POLL_SECONDS
        while True:
            await asyncio.sleep(pause)
            try:
                await self._decide()
                began = time.perf_counter()
                changed = any(file.changed() for file in (*self._files, self._written))
                pause = min(max(POLL_SECONDS, (time.perf_counter() - began) / _SHARE), SLOWEST_POLL_SECONDS)
                if changed:
                    # A model takes a while to load, and the event loop has requests to answer.
                    await asyncio.to_thread(self.load)
            except Exception as error:  # noqa: BLE001 - a defect, and the next change may be without it
                log.warning("reload failed", exception=type(error).__name__, at=log.place(error))

    @property
    def _files(self) -> tuple[WatchedFile[Any], ...]:
        # Against the order of `Generations.write`: at no time is a contract in none of the files that were read.
        return self._next, self._contract, self._retired, self._deployment, self._decision

    def _loaded(self, text: bytes, where: str) -> "_Deployed":
        deployment = Deployment.loads(text, where)
        candidate, probation = deployment.candidate, deployment.probation
        deployment = msgspec.structs.replace(deployment, candidate=None, probation=None)
        before = self._deployment.content
        loaded = before if isinstance(before, _Deployed) else _Deployed(None)
        model = loaded.trial.restored(deployment) if isinstance(loaded.trial, ProbationRun) else None
        if model is None and isinstance(loaded.model, Model) and loaded.model.deployment == deployment:
            # Only the candidate has changed.
            model = loaded.model if candidate or loaded.trial else None
        if model is None:
            model = Model(deployment, self._public_key)
        if probation is None or clock.now() >= probation.until:
            return _Deployed(model, None if candidate is None else self._run(candidate))
        return _Deployed(model, ProbationRun(deployment, probation, self._former(probation.before, loaded.model)))

    def _former(self, deployment: Deployment, loaded: Model | IsthmusError | None) -> Model | IsthmusError:
        """The model that a server goes back to: as a rule the one that has just answered."""
        if isinstance(loaded, Model) and loaded.deployment.alone == deployment:
            return loaded
        try:
            return Model(deployment, self._public_key)
        except IsthmusError as error:
            return error

    def _run(self, candidate: Candidate) -> CandidateRun:
        try:
            return CandidateRun(candidate, Model(candidate.deployment, self._public_key))
        except IsthmusError as error:
            log.warning("candidate refused", problem=str(error))
            return CandidateRun(candidate, error)

    def _report(self, run: CandidateRun | ProbationRun, why: str) -> None:
        """Writes down, once, that a model was given up here: for all workers, and for the command line."""
        self._reported = run
        deployment = run.deployment
        if read_decision(self._deployment.path, deployment) is not None:
            return
        log.warning(f"{run.role} model given up", package=deployment.digest, problem=why)
        decision = Decision(deployment.digest, deployment.deployed_at, clock.now(), why)
        try:
            write_atomically(decision_file(self._deployment.path), decision.dumps())
        except OSError as error:
            log.warning("decision not written", problem=error.strerror or str(error))

    async def _decide(self) -> None:
        """Acts on what a trial has come to: a model given up, or a probation that is over."""
        probation = self.state.probation
        run = self.state.candidate_run or probation
        if run is not None and run.refused is not None and run is not self._reported:
            await asyncio.to_thread(self._report, run, run.refused)
        if probation is None:
            return
        if probation.refused is not None and self.state.former is not None:
            if time.monotonic() >= self._retry:
                await asyncio.to_thread(self._undo, probation.deployment, probation.refused)
        elif clock.now() >= probation.probation.until and isinstance(self._deployment.content, _Deployed):
            self._deployment.content = _Deployed(self._deployment.content.model)
            self.state = await asyncio.to_thread(self._compiled)

    def _undo(self, deployment: Deployment, why: str) -> None:
        """Puts the former deployment in force again. Until that is done, its model answers in this process."""
        # Most likely, a deployment is under way: it may take a while, and what it does counts.
        self._retry = time.monotonic() + SLOWEST_POLL_SECONDS
        try:
            if undo(self._deployment.path, deployment, why, at=clock.now()):
                log.warning("deployment undone", package=deployment.digest, problem=why)
        except Exception as error:  # noqa: BLE001 - whatever it is, the files are followed
            if self._undecided != deployment:
                log.warning("deployment not undone yet", package=deployment.digest, problem=why, because=str(error))
            self._undecided = deployment


@dataclass(frozen=True)
class _Deployed:
    model: Model | IsthmusError | None
    trial: CandidateRun | ProbationRun | None = None
