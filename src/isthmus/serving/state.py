"""What a server answers from: the contract and the model, replaced together and never changed in place."""

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
from isthmus.serving.rollout.candidate import Trial
from isthmus.serving.wire.errors import NotFoundError, NotReadyError

LOOKUPS = 256
"""Lists of features that are kept compiled."""


class State:
    """A contract and a model, if they are there, and what is compiled from them.

    Args:
        contract: the contract, or why there is none.
        model: the model, or why there is none; None if nothing is deployed.
        refused: why the deployment that is there now was not taken up.
        before: the contract before this one, if the server has seen one.
        trial: what is tried beside the model; None if nothing is.
        batch: rows of several requests that are predicted together.
    """

    def __init__(
        self,
        contract: Contract | IsthmusError | None = None,
        model: Model | IsthmusError | None = None,
        refused: IsthmusError | None = None,
        before: Contract | None = None,
        trial: Trial | None = None,
        batch: int = BATCH_ROWS,
    ) -> None:
        self._batch = batch
        self._contract = contract
        self._model = model
        self.trial = trial
        # Of rows that were written under one of these it can be told what has changed since.
        made = None if self.model is None else self.model.contract
        self._earlier = [one for one in (before, made) if one is not None]
        self.refused = None if refused is None else str(refused)
        self.lookup = lru_cache(LOOKUPS)(self._compile)
        self.service_lookup = lru_cache(LOOKUPS)(self._compile_service)
        self.pushed = lru_cache(LOOKUPS)(self._compile_pushed)
        self.graph = lru_cache(LOOKUPS)(lambda name: RowGraph(self.contract.transforms[name]))

    @property
    def contract(self) -> Contract:
        """The contract.

        Raises:
            NotReadyError: there is none.
        """
        if isinstance(self._contract, Contract):
            return self._contract
        raise _not_ready(self._contract, "contract", "there is none yet", "run `isthmus apply`")

    @property
    def model(self) -> Model | None:
        """The model, if there is one."""
        return self._model if isinstance(self._model, Model) else None

    @cached_property
    def join_keys(self) -> Mapping[str, Column]:
        """Every join key of the contract by its name."""
        return {column.name: column for view in self.contract.views.values() for column in view.keys}

    @property
    def outdated(self) -> IsthmusError | None:
        """Why the model cannot answer; None if it can, or if there is none."""
        return self._predictor if self.model is not None and isinstance(self._predictor, IsthmusError) else None

    @cached_property
    def _predictor(self) -> Predictor | IsthmusError:
        # What is refused is compared once, not for every request.
        try:
            return Predictor(self.contract, self.deployed(None), self.graph, self._earlier, self._batch)
        except IsthmusError as error:
            return error

    def deployed(self, name: str | None) -> Model:
        """The named model, or the only one.

        Raises:
            NotReadyError: no model is deployed.
            NotFoundError: there is a model, but not this one.
        """
        if not isinstance(self._model, Model):
            raise _not_ready(self._model, "model", "none is deployed", "run `isthmus deploy`")
        known = self._model.deployment.model
        if name is not None and name != known:
            raise NotFoundError("model", f"no model {name!r}", expected=known)
        return self._model

    def predictor(self) -> Predictor:
        """What answers the predictions of the deployed model.

        Raises:
            NotReadyError: there is no contract, or no model.
            ContractMismatch: what the model reads has changed since its package was made.
        """
        found = self._predictor
        if isinstance(found, IsthmusError):
            # Without the frames of the refusals before it, which would pile up.
            raise found.with_traceback(None)
        return found

    @property
    def candidate(self) -> Predictor | None:
        """What answers the predictions of the candidate; None if there is none, or it has been given up."""
        if self.trial is None or self.trial.refused is not None:
            return None
        return self._candidate

    @cached_property
    def _candidate(self) -> Predictor | None:
        trial = self.trial
        if trial is None or not isinstance(trial.model, Model):
            return None
        try:
            return Predictor(self.contract, trial.model, self.graph, self._earlier, self._batch)
        except ContractMismatch as error:
            trial.refused = str(error)
        except IsthmusError:
            # There is no contract: neither of the two can be asked.
            pass
        return None

    def _compile(self, references: tuple[str, ...], full_names: bool) -> Lookup:
        return self._looking_up(resolve(self.contract, references), full_names)

    def _compile_service(self, service: str, full_names: bool) -> Lookup:
        return self._looking_up(service_features(self.contract, service), full_names)

    def _looking_up(self, features: Sequence[tuple[str, str]], full_names: bool) -> Lookup:
        return Lookup(self.contract, features, full_names=full_names, graphs=self.graph, earlier=self._earlier)

    def _compile_pushed(self, view: str, form: Form) -> PushedView:
        known = self.contract.views.get(view)
        if known is None:
            expected = "one of " + (", ".join(sorted(self.contract.views)) or "none")
            raise NotFoundError(form.view, f"no view {view!r}", expected=expected)
        return PushedView(self.contract, known, form)


def _not_ready(problem: IsthmusError | None, where: str, found: str, remedy: str) -> NotReadyError:
    """What to say when a file is broken, or when there is none."""
    if problem is None:
        return NotReadyError(where, found, remedy=remedy)
    return NotReadyError(problem.where, problem.found, expected=problem.expected, remedy=problem.remedy)
