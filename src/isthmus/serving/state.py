"""The state of a server: its contract and its model, replaced together and never changed in place."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeVar

from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Column, Contract, ViewContract
from isthmus.features.errors import ContractMismatch, IsthmusError, RequestError, one_of
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.profiles import BATCH_ROWS
from isthmus.features.request.graph import RowGraph
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.lookup import Lookup, resolve, service_features
from isthmus.serving.lookup.prompt import Prompt
from isthmus.serving.lookup.push import Form, PushedView
from isthmus.serving.predict.generator import Generator
from isthmus.serving.predict.model import Model
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.predict.tensors import TensorPredictor
from isthmus.serving.rollout.candidate import CandidateRun
from isthmus.serving.rollout.probation import ProbationRun
from isthmus.serving.wire.errors import NotFoundError, NotReadyError
from isthmus.serving.wire.inference import TensorRequest
from isthmus.serving.wire.messages import PredictRequest

T = TypeVar("T")


class AnyPredictor(Protocol):
    """A model with what it reads; inputs and outputs are its own."""

    contract: Contract
    model: Model
    plan: LookupPlan
    bits: Mapping[str, bytes]
    batches: Any

    def read(self, message: PredictRequest | TensorRequest, limits: Limits) -> tuple[dict[str, list[Any]], Any, int]:
        """The join keys, what else a request brings, and the number of its rows; raises a RequestError."""

    def inputs(self, fields: Any, answers: Mapping[str, ViewAnswer]) -> Any:
        """What the model reads, from a request and from the views."""

    def require(self, output: Any, inputs: Any) -> None:
        """Refuses what the model has no answer for, with a RequestError."""


LOOKUPS = 256
"""Lists of features whose compiled lookups are cached."""


DEPLOYMENT_STATES = ("settled", "probation", "no_way_back", "undone")


class State:
    """The contracts and a model, if any, and what is compiled from them.

    `problem` is why there is no contract, and the model may be why there is none. `refused` is why the current
    deployment file was.
    """

    def __init__(
        self,
        generations: Generations = Generations(),  # noqa: B008 - it never changes
        problem: IsthmusError | None = None,
        model: Model | IsthmusError | None = None,
        refused: IsthmusError | None = None,
        trial: CandidateRun | ProbationRun | None = None,
        batch: int = BATCH_ROWS,
    ) -> None:
        self._batch = batch
        self._generations, self._problem = generations, problem
        self._model = model
        self.candidate_run = trial if isinstance(trial, CandidateRun) else None
        self.probation = trial if isinstance(trial, ProbationRun) else None
        # Rows that were written under an earlier contract are refused by saying what has changed since.
        models = [self._model, self.probation and self.probation.former]
        exported = [model.contract for model in models if isinstance(model, Model)]
        self._earlier = [*(item.contract for item in generations.retired), *exported]
        self.refused = None if refused is None else str(refused)
        self.lookup = lru_cache(LOOKUPS)(lambda names, full: self._compile(self._named(resolve, names), full))
        self.service_lookup = lru_cache(LOOKUPS)(
            lambda name, full: self._compile(self._named(service_features, name), full)
        )
        self.pushed = lru_cache(LOOKUPS)(self._compile_pushed)
        self.graph = self._graphs(generations.current)

    @property
    def contract(self) -> Contract:
        """The current contract."""
        if self._generations.current is not None:
            return self._generations.current
        raise _not_ready(self._problem, "contract", "there is none yet", "run `isthmus apply`")

    @property
    def is_deployed(self) -> bool:
        """Whether there is a deployment, also if its model cannot be loaded."""
        return self._model is not None

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
    def _predictor(self) -> AnyPredictor | IsthmusError:
        # A refusal is worked out once, not for every request.
        try:
            return self._predictor_of(self.deployed(None))
        except IsthmusError as error:
            return error

    @cached_property
    def earlier_views(self) -> list[ViewContract]:
        """The views that the model reads as they were before, because it runs under an earlier contract."""
        predictor = None if self.model is None else self._predictor
        if predictor is None or isinstance(predictor, IsthmusError) or predictor.contract.hash == self.contract.hash:
            return []
        contract, service = predictor.contract, predictor.model.deployment.service
        read = {view: contract.views[view] for view, _ in contract.read(service)}
        return [view for name, view in read.items() if view != self.contract.views.get(name)]

    @property
    def stored(self) -> list[ViewContract]:
        """Return the views whose rows are read."""
        return [*self.contract.views.values(), *self.earlier_views]

    def _predictor_of(self, model: Model) -> AnyPredictor:
        """The predictor of a model: under the contract that it was trained for, as long as that one has its rows."""
        contract = self._generations.of_model(model.contract, model.deployment.service) or self.contract
        if not model.inputs:
            return TensorPredictor(contract, model)
        return Predictor(contract, model, self._graphs(contract), self._earlier, self._batch)

    def deployed(self, name: str | None) -> Model:
        """The model of this name; None for the only model."""
        if not isinstance(self._model, Model):
            raise _not_ready(self._model, "model", "none is deployed", "run `isthmus deploy`")
        known = self._model.deployment.model
        if name is not None and name != known:
            raise NotFoundError("model", f"no model {name!r}", expected=known)
        return self._model

    def predictor(self) -> AnyPredictor:
        """The predictor of the deployed model; raises why there is none (NotReadyError, ContractMismatch)."""
        predictor = self._predictor
        if isinstance(predictor, IsthmusError):
            # Without the frames of the refusals before it, which would pile up.
            raise predictor.with_traceback(None)
        return predictor

    def generator(self, name: str | None) -> Generator:
        """What generates text with the model of this name, or the only model.

        Raises:
            RequestError: the model generates no text.
            NotReadyError, ContractMismatch: there is no model that can answer.
        """
        model = self.deployed(name).deployment.model
        predictor = self.predictor()
        if self._generator is None:
            raise RequestError(f"model {model}", "generates no text", expected="a causal language model",
                               remedy=f"see /models, and ask /predict or /v2/models/{model}/infer")  # fmt: skip
        assert predictor is self._generator.predictor  # noqa: S101 - both follow from the state
        return self._generator

    @cached_property
    def _generator(self) -> Generator | None:
        predictor = self._predictor
        return Generator(predictor) if isinstance(predictor, TensorPredictor) and predictor.model.text else None

    @cached_property
    def prompt(self) -> Prompt:
        """The features of the prompts of the deployed model, which generates text."""
        generator = self._generator
        assert generator is not None  # noqa: S101 - who asks has the generator
        contract, service = generator.predictor.contract, generator.predictor.model.deployment.service
        graphs = self._graphs(contract)
        return Prompt(generator.generation, contract, service, graphs=graphs, earlier=self._earlier)

    @property
    def candidate(self) -> AnyPredictor | None:
        """The predictor of the candidate; None if there is none, or it has been given up."""
        if self.candidate_run is None or self.candidate_run.refused is not None:
            return None
        return self._candidate

    @cached_property
    def _candidate(self) -> AnyPredictor | None:
        run = self.candidate_run
        if run is None or not isinstance(run.model, Model):
            return None
        try:
            return self._predictor_of(run.model)
        except ContractMismatch as error:
            run.refused = str(error)
        except IsthmusError:
            # There is no contract: neither model can answer.
            pass
        return None

    @cached_property
    def former(self) -> AnyPredictor | None:
        """The predictor of the model before the deployed model, while that is on probation and there is a way back."""
        run = self.probation
        if run is None or not isinstance(run.former, Model):
            return None
        try:
            former = self._predictor_of(run.former)
        except IsthmusError as error:
            run.problem = str(error)
            return None
        run.problem = None
        return former

    def versions(self) -> dict[str, AnyPredictor]:
        """The predictors that can be asked for by the digest of their package, the deployed model's first."""
        versions: dict[str, AnyPredictor] = {}
        for predictor in (self.predictor(), self.candidate, self.former):
            if predictor is not None:
                versions.setdefault(predictor.model.deployment.digest, predictor)
        return versions

    @property
    def deployment_state(self) -> str:
        """Which of `DEPLOYMENT_STATES` the deployment is in; "undone" where that is the deployment before it."""
        if self.probation is not None:
            if self.former is None:
                return "no_way_back"
            return "probation" if self.probation.refused is None else "undone"
        return "undone" if self.model is not None and self.model.deployment.undone is not None else "settled"

    def _named(self, resolve: Callable[[Contract, T], list[tuple[str, str]]], asked: T) -> list[tuple[str, str]]:
        """The features that a request asks for."""
        try:
            return resolve(self.contract, asked)
        except NotFoundError as error:
            following = self._generations.next
            if following is None:
                raise
            try:
                resolve(following, asked)
            except NotFoundError:
                raise error from None
            remedy = f"contract {following.hash[:12]} has it: it is current once `isthmus materialize` is done"
            raise NotFoundError(error.where, error.found, expected=error.expected, remedy=remedy) from None

    def _compile(self, features: Sequence[tuple[str, str]], full_names: bool) -> Lookup:
        return Lookup(self.contract, features, full_names=full_names, graphs=self.graph, earlier=self._earlier)

    def _compile_pushed(self, view: str, form: Form) -> tuple[list[PushedView], list[PushedView]]:
        """The definitions of a view: first those that rows may be pushed to, the current and the next one."""
        contract, following = self.contract, self._generations.next
        declared = [c.views[view] for c in (contract, following) if c is not None and view in c.views]
        if not declared:
            raise NotFoundError(form.view, f"no view {view!r}", expected=one_of(contract.views))
        pushed = {place.slot: PushedView(contract.project, place, form) for place in self._generations.places(view)}
        now = [pushed.pop(slot) for slot in dict.fromkeys(place.slot for place in declared)]
        return now, list(pushed.values())

    def _graphs(self, contract: Contract | None) -> Callable[[str], RowGraph]:
        return lru_cache(LOOKUPS)(lambda name: RowGraph((contract or self.contract).transforms[name]))


def _not_ready(problem: IsthmusError | None, where: str, missing: str, remedy: str) -> NotReadyError:
    if problem is None:
        return NotReadyError(where, missing, remedy=remedy)
    return NotReadyError(problem.where, problem.found, expected=problem.expected, remedy=problem.remedy)
