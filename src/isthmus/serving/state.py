"""The state of a server: its contract and its model, replaced together and never changed in place."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

from isthmus.features.contract.contract import Column, Contract
from isthmus.features.errors import ContractMismatch, IsthmusError
from isthmus.features.profiles import BATCH_ROWS
from isthmus.features.request.graph import RowGraph
from isthmus.serving.lookup.lookup import Lookup, resolve, service_features
from isthmus.serving.lookup.push import Form, PushedView
from isthmus.serving.predict.model import Model
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.rollout.candidate import CandidateRun
from isthmus.serving.wire.errors import NotFoundError, NotReadyError, any_of

LOOKUPS = 256
"""Lists of features whose compiled lookups are cached."""


class State:
    """A contract and a model, if any, and what is compiled from them.

    Contract and model may be why there is none. `refused` is why the current deployment file was; `before` is the
    contract that the server had before.
    """

    def __init__(
        self,
        contract: Contract | IsthmusError | None = None,
        model: Model | IsthmusError | None = None,
        refused: IsthmusError | None = None,
        before: Contract | None = None,
        candidate_run: CandidateRun | None = None,
        batch: int = BATCH_ROWS,
    ) -> None:
        self._batch = batch
        self._contract = contract
        self._model = model
        self.candidate_run = candidate_run
        # Rows that were written under an earlier contract are refused by saying what has changed since.
        exported = None if self.model is None else self.model.contract
        self._earlier = [contract for contract in (before, exported) if contract is not None]
        self.refused = None if refused is None else str(refused)
        self.lookup = lru_cache(LOOKUPS)(lambda names, full: self._compile(resolve(self.contract, names), full))
        self.service_lookup = lru_cache(LOOKUPS)(
            lambda name, full: self._compile(service_features(self.contract, name), full)
        )
        self.pushed = lru_cache(LOOKUPS)(self._compile_pushed)
        self.graph = lru_cache(LOOKUPS)(lambda name: RowGraph(self.contract.transforms[name]))

    @property
    def contract(self) -> Contract:
        """The contract."""
        if isinstance(self._contract, Contract):
            return self._contract
        raise _not_ready(self._contract, "contract", "there is none yet", "run `isthmus apply`")

    @property
    def model(self) -> Model | None:
        """The model, if any."""
        return self._model if isinstance(self._model, Model) else None

    @cached_property
    def join_keys(self) -> Mapping[str, Column]:
        """Every join key of the contract by its name."""
        return {column.name: column for view in self.contract.views.values() for column in view.keys}

    @property
    def outdated(self) -> IsthmusError | None:
        """Why the model cannot answer; None if it can, or if nothing is deployed."""
        return self._predictor if self.model is not None and isinstance(self._predictor, IsthmusError) else None

    @cached_property
    def _predictor(self) -> Predictor | IsthmusError:
        # A refusal is worked out once, not for every request.
        try:
            return Predictor(self.contract, self.deployed(None), self.graph, self._earlier, self._batch)
        except IsthmusError as error:
            return error

    def deployed(self, name: str | None) -> Model:
        """The model of this name; None for the only model."""
        if not isinstance(self._model, Model):
            raise _not_ready(self._model, "model", "none is deployed", "run `isthmus deploy`")
        known = self._model.deployment.model
        if name is not None and name != known:
            raise NotFoundError("model", f"no model {name!r}", expected=known)
        return self._model

    def predictor(self) -> Predictor:
        """The predictor of the deployed model; raises why there is none (NotReadyError, ContractMismatch)."""
        predictor = self._predictor
        if isinstance(predictor, IsthmusError):
            # Without the frames of the refusals before it, which would pile up.
            raise predictor.with_traceback(None)
        return predictor

    @property
    def candidate(self) -> Predictor | None:
        """The predictor of the candidate; None if there is none, or it has been given up."""
        if self.candidate_run is None or self.candidate_run.refused is not None:
            return None
        return self._candidate

    @cached_property
    def _candidate(self) -> Predictor | None:
        run = self.candidate_run
        if run is None or not isinstance(run.model, Model):
            return None
        try:
            return Predictor(self.contract, run.model, self.graph, self._earlier, self._batch)
        except ContractMismatch as error:
            run.refused = str(error)
        except IsthmusError:
            # There is no contract: neither model can answer.
            pass
        return None

    def _compile(self, features: Sequence[tuple[str, str]], full_names: bool) -> Lookup:
        return Lookup(self.contract, features, full_names=full_names, graphs=self.graph, earlier=self._earlier)

    def _compile_pushed(self, view: str, form: Form) -> PushedView:
        if view not in self.contract.views:
            raise NotFoundError(form.view, f"no view {view!r}", expected=any_of(self.contract.views))
        return PushedView(self.contract, self.contract.views[view], form)


def _not_ready(problem: IsthmusError | None, where: str, missing: str, remedy: str) -> NotReadyError:
    if problem is None:
        return NotReadyError(where, missing, remedy=remedy)
    return NotReadyError(problem.where, problem.found, expected=problem.expected, remedy=problem.remedy)
