"""`Watch` loads new contracts and deployments while the server runs, and ends trials that fail."""

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
from isthmus.serving.deployment.record import CandidateDeployment, Deployment
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.rollout.decision import Decision, decision_file, read_decision
from isthmus.serving.rollout.releases import undo
from isthmus.serving.rollout.trial import CandidateRun, ProbationRun
from isthmus.serving.state import State
from isthmus.serving.watchedfile import WatchedFile

POLL_SECONDS = 0.025
"""Seconds between two checks of the files if a check takes microseconds, as on a local disk."""

SLOWEST_POLL_SECONDS = 0.5
"""Longest time between two checks."""

_SHARE = 0.02
"""Largest fraction of time spent on checks. On a network file system a check may take milliseconds."""


class Watch:
    """Rebuild the `state` of a server when its contract, deployment or decision files change.

    Call `load` first, then run `run` in the background. A request must read `state` only once: every change replaces
    it.
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
        content = self._written.content
        return content if isinstance(content, dict) else {}

    def load(self) -> None:
        loaded = False
        if self._written.changed():
            self._written.load()  # not part of the state
        for file in self._files:
            if file.changed():
                file.load()
                loaded = True
        if loaded:
            self.state = self._compiled()

    def _compiled(self) -> State:
        deployed, decision = self._deployment.content, self._decision.content
        loaded = deployed if isinstance(deployed, _Deployed) else _Deployed(deployed)
        run = loaded.trial
        if run is not None and isinstance(decision, Decision) and decision.matches(run.deployment):
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
        # Compile the predictors now, before a request needs them.
        if state.candidate is None and state.former is None and state.probation is not None:
            log.warning("deployment cannot be undone", problem=state.probation.problem)
        return state

    async def run(self) -> None:
        """Reload the contract, deployment and decision files whenever they change, until canceled. Log errors.

        If a model on trial fails, writes a decision file, so that other workers end the trial, too. If it was on
        probation, also restores the previous deployment in the deployment file, under the lock of deployments. Ends a
        probation in memory when its time is over.
        """
        pause = POLL_SECONDS
        while True:
            await asyncio.sleep(pause)
            try:
                await self._decide()
                began = time.perf_counter()
                changed = any(file.changed() for file in (*self._files, self._written))
                pause = min(max(POLL_SECONDS, (time.perf_counter() - began) / _SHARE), SLOWEST_POLL_SECONDS)
                if changed:
                    # Loading a model takes a while; keep the event loop free.
                    await asyncio.to_thread(self.load)
            except Exception as error:  # noqa: BLE001 - keep watching: the next change may fix it
                log.warning("reload failed", exception=type(error).__name__, at=log.place(error))

    @property
    def _files(self) -> tuple[WatchedFile[Any], ...]:
        # The reverse of the order in which `Generations.write` writes, so that no contract is missed between two reads.
        return self._next, self._contract, self._retired, self._deployment, self._decision

    def _loaded(self, text: bytes, where: str) -> "_Deployed":
        deployment = Deployment.loads(text, where)
        candidate, probation = deployment.candidate, deployment.probation
        deployment = msgspec.structs.replace(deployment, candidate=None, probation=None)
        before = self._deployment.content
        loaded = before if isinstance(before, _Deployed) else _Deployed(None)
        model = loaded.trial.reuse_former(deployment) if isinstance(loaded.trial, ProbationRun) else None
        if model is None and isinstance(loaded.model, DeployedModel) and loaded.model.deployment == deployment:
            # Reuse the model if only the candidate changed.
            model = loaded.model if candidate or loaded.trial else None
        if model is None:
            model = DeployedModel(deployment, self._public_key)
        if probation is None or clock.now() >= probation.until:
            return _Deployed(model, None if candidate is None else self._run(candidate))
        return _Deployed(model, ProbationRun(deployment, probation, self._former(probation.before, loaded.model)))

    def _former(
        self, deployment: Deployment, loaded: DeployedModel | IsthmusError | None
    ) -> DeployedModel | IsthmusError:
        if isinstance(loaded, DeployedModel) and loaded.deployment.without_trials == deployment:
            return loaded
        try:
            return DeployedModel(deployment, self._public_key)
        except IsthmusError as error:
            return error

    def _run(self, candidate: CandidateDeployment) -> CandidateRun:
        try:
            return CandidateRun(candidate, DeployedModel(candidate.deployment, self._public_key))
        except IsthmusError as error:
            log.warning("candidate refused", problem=str(error))
            return CandidateRun(candidate, error)

    def _report(self, run: CandidateRun | ProbationRun, why: str) -> None:
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
        """Try to restore the previous deployment, and log a failure. `run` tries again later.

        The previous model answers in this process meanwhile.
        """
        # Another deployment is probably in progress; retry later, since it may change what is deployed.
        self._retry = time.monotonic() + SLOWEST_POLL_SECONDS
        try:
            if undo(self._deployment.path, deployment, why, at=clock.now()):
                log.warning("deployment undone", package=deployment.digest, problem=why)
        except Exception as error:  # noqa: BLE001 - keep watching after any error
            if self._undecided != deployment:
                log.warning("deployment not undone yet", package=deployment.digest, problem=why, because=str(error))
            self._undecided = deployment


@dataclass(frozen=True)
class _Deployed:
    model: DeployedModel | IsthmusError | None
    trial: CandidateRun | ProbationRun | None = None
