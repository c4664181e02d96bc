"""The state of a server: its contracts and its model, replaced together and never changed in place."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeVar

from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Column, Contract, ViewContract
from isthmus.features.errors import ContractMismatch, IsthmusError, RequestError, one_of
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.profiles import BATCH_ROWS
from isthmus.features.request.graph import RowGraph
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.lookup import Lookup, resolve, service_features
from isthmus.serving.lookup.prompt import Prompt
from isthmus.serving.lookup.push import PushedView, PushFormat
from isthmus.serving.predict.generator import Generator
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.predict.tensors import TensorPredictor
from isthmus.serving.rollout.trial import CandidateRun, ProbationRun
from isthmus.serving.wire.errors import NotFoundError, NotReadyError
from isthmus.serving.wire.inference import TensorRequest
from isthmus.serving.wire.messages import PredictRequest

T = TypeVar("T")


class AnyPredictor(Protocol):
    """A model with the features it reads: a `Predictor` of rows or a `TensorPredictor`."""

    contract: Contract
    model: DeployedModel
    plan: LookupPlan
    bits: Mapping[str, bytes]
    batches: Any

    def read(self, message: PredictRequest | TensorRequest, limits: Limits) -> tuple[dict[str, list[Any]], Any, int]:
        """Decode a request: return its join keys by name, its request fields or tensors, and its number of rows.

        Raises a RequestError for the wrong kind of message, missing or unknown columns, too many rows, or values that
        do not fit.
        """

    def inputs(self, fields: Any, answers: Mapping[str, ViewAnswer]) -> Any:
        """Combine the request fields or tensors from `read` with the stored features into the inputs of the model.

        `answers` has the stored features by view name.
        """

    def require(self, output: Any, inputs: Any) -> None:
        """Raise a RequestError if a row has no output because a request transform cannot compute its values.

        Call it after a prediction, with the `inputs` of that prediction.
        """


LOOKUPS = 256
"""Number of feature lists whose compiled lookups are cached."""


DEPLOYMENT_STATES = ("settled", "probation", "no_way_back", "undone")


class State:
    """The contracts (declared features) and the model of a server, with everything compiled from them.

    `problem` is the error of loading a contract. `model` is the deployed model, the error of loading it, or None
    without a deployment. `refused` is the error of the current deployment file, while an earlier model may stay in use.
    """

    def __init__(
        self,
        generations: Generations = Generations(),  # noqa: B008 - it never changes
        problem: IsthmusError | None = None,
        model: DeployedModel | IsthmusError | None = None,
        refused: IsthmusError | None = None,
        trial: CandidateRun | ProbationRun | None = None,
        batch: int = BATCH_ROWS,
    ) -> None:
        self._batch = batch
        self._generations, self._problem = generations, problem
        self._model = model
        self.candidate_run = trial if isinstance(trial, CandidateRun) else None
        self.probation = trial if isinstance(trial, ProbationRun) else None
        # To refuse a row written under an earlier contract, we name the differences between the contracts.
        models = [self._model, self.probation and self.probation.former]
        exported = [model.contract for model in models if isinstance(model, DeployedModel)]
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
        if self._generations.current is not None:
            return self._generations.current
        raise _not_ready(self._problem, "contract", "does not exist yet", "run `isthmus apply`")

    @property
    def is_deployed(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> DeployedModel | None:
        return self._model if isinstance(self._model, DeployedModel) else None

    @cached_property
    def join_keys(self) -> Mapping[str, Column]:
        return {column.name: column for view in self.contract.views.values() for column in view.keys}

    @property
    def outdated(self) -> IsthmusError | None:
        return self._predictor if self.model is not None and isinstance(self._predictor, IsthmusError) else None

    @cached_property
    def _predictor(self) -> AnyPredictor | IsthmusError:
        # Compute a refusal once, not for every request.
        try:
            return self._predictor_of(self.deployed(None))
        except IsthmusError as error:
            return error

    @cached_property
    def earlier_views(self) -> list[ViewContract]:
        predictor = None if self.model is None else self._predictor
        if predictor is None or isinstance(predictor, IsthmusError) or predictor.contract.hash == self.contract.hash:
            return []
        contract, service = predictor.contract, predictor.model.deployment.service
        read = {view: contract.views[view] for view, _ in contract.stored_features(service)}
        return [view for name, view in read.items() if view != self.contract.views.get(name)]

    @property
    def stored(self) -> list[ViewContract]:
        return [*self.contract.views.values(), *self.earlier_views]

    def _predictor_of(self, model: DeployedModel) -> AnyPredictor:
        contract = self._generations.compatible_contract(model.contract, model.deployment.service) or self.contract
        if not model.inputs:
            return TensorPredictor(contract, model)
        return Predictor(contract, model, self._graphs(contract), self._earlier, self._batch)

    def deployed(self, name: str | None) -> DeployedModel:
        if not isinstance(self._model, DeployedModel):
            raise _not_ready(self._model, "model", "is not deployed", "run `isthmus deploy`")
        known = self._model.deployment.model
        if name is not None and name != known:
            raise NotFoundError("model", f"no model {name!r}", expected=known)
        return self._model

    def predictor(self) -> AnyPredictor:
        predictor = self._predictor
        if isinstance(predictor, IsthmusError):
            # Drop the traceback, which would grow with every raise.
            raise predictor.with_traceback(None)
        return predictor

    def generator(self, name: str | None) -> Generator:
        model = self.deployed(name).deployment.model
        predictor = self.predictor()
        if self._generator is None:
            raise RequestError(f"model {model}", "does not generate text", expected="a causal language model",
                               remedy=f"see /models, and use /predict or /v2/models/{model}/infer")  # fmt: skip
        assert predictor is self._generator.predictor  # noqa: S101 - both follow from the state
        return self._generator

    @cached_property
    def _generator(self) -> Generator | None:
        predictor = self._predictor
        return Generator(predictor) if isinstance(predictor, TensorPredictor) and predictor.model.text else None

    @cached_property
    def prompt(self) -> Prompt:
        generator = self._generator
        assert generator is not None  # noqa: S101 - the caller has a generator
        contract, service = generator.predictor.contract, generator.predictor.model.deployment.service
        graphs = self._graphs(contract)
        return Prompt(generator.generation, contract, service, graphs=graphs, earlier=self._earlier)

    @property
    def candidate(self) -> AnyPredictor | None:
        if self.candidate_run is None or self.candidate_run.refused is not None:
            return None
        return self._candidate

    @cached_property
    def _candidate(self) -> AnyPredictor | None:
        run = self.candidate_run
        if run is None or not isinstance(run.model, DeployedModel):
            return None
        try:
            return self._predictor_of(run.model)
        except ContractMismatch as error:
            run.refused = str(error)
        except IsthmusError:
            # Without a contract neither model can answer.
            pass
        return None

    @cached_property
    def former(self) -> AnyPredictor | None:
        # The first access sets `probation.problem`.
        run = self.probation
        if run is None or not isinstance(run.former, DeployedModel):
            return None
        try:
            former = self._predictor_of(run.former)
        except IsthmusError as error:
            run.problem = str(error)
            return None
        run.problem = None
        return former

    def versions(self) -> dict[str, AnyPredictor]:
        versions: dict[str, AnyPredictor] = {}
        for predictor in (self.predictor(), self.candidate, self.former):
            if predictor is not None:
                versions.setdefault(predictor.model.deployment.digest, predictor)
        return versions

    def version_states(self) -> list[tuple[Deployment, str]]:
        """Return the deployed package and those on trial, each with the reason why it cannot answer, or ""."""
        # A version is a package: one that was deployed again, with another profile, is there once.
        states: dict[str, tuple[Deployment, str]] = {}
        if self.model is not None:
            states[self.model.deployment.digest] = (self.model.deployment, str(self.outdated or ""))
        if (run := self.candidate_run) is not None:
            why = "" if self.candidate is not None else run.refused or "its package cannot be loaded: see /models"
            states.setdefault(run.deployment.digest, (run.deployment, why))
        if self.probation is not None:
            before = self.probation.probation.before
            why = "" if self.former is not None else self.probation.problem or ""
            states.setdefault(before.digest, (before, why))
        return [*states.values()]

    @property
    def deployment_state(self) -> str:
        if self.probation is not None:
            if self.former is None:
                return "no_way_back"
            return "probation" if self.probation.refused is None else "undone"
        return "undone" if self.model is not None and self.model.deployment.undone is not None else "settled"

    def _named(self, resolve: Callable[[Contract, T], list[tuple[str, str]]], names: T) -> list[tuple[str, str]]:
        try:
            return resolve(self.contract, names)
        except NotFoundError as error:
            following = self._generations.next
            if following is None:
                raise
            try:
                resolve(following, names)
            except NotFoundError:
                raise error from None
            remedy = f"contract {following.hash[:12]} has it; finish `isthmus materialize` to make it current"
            raise NotFoundError(error.where, error.found, expected=error.expected, remedy=remedy) from None

    def _compile(self, features: Sequence[tuple[str, str]], full_names: bool) -> Lookup:
        return Lookup(self.contract, features, full_names=full_names, graphs=self.graph, earlier=self._earlier)

    def _compile_pushed(self, view: str, form: PushFormat) -> tuple[list[PushedView], list[PushedView]]:
        contract, following = self.contract, self._generations.next
        declared = [c.views[view] for c in (contract, following) if c is not None and view in c.views]
        if not declared:
            raise NotFoundError(form.view, f"no view {view!r}", expected=one_of(contract.views))
        pushed = {
            place.slot: PushedView(contract.project, place, form) for place in self._generations.definitions(view)
        }
        now = [pushed.pop(slot) for slot in dict.fromkeys(place.slot for place in declared)]
        return now, list(pushed.values())

    def _graphs(self, contract: Contract | None) -> Callable[[str], RowGraph]:
        return lru_cache(LOOKUPS)(lambda name: RowGraph((contract or self.contract).transforms[name]))


def _not_ready(problem: IsthmusError | None, where: str, missing: str, remedy: str) -> NotReadyError:
    if problem is None:
        return NotReadyError(where, missing, remedy=remedy)
    return NotReadyError(problem.where, problem.found, expected=problem.expected, remedy=problem.remedy)
