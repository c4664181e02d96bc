"""The ASGI application: lookups, predictions and the state of the server."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from isthmus.features import clock
from isthmus.features.errors import IsthmusError, RequestError
from isthmus.features.online import LookupPlan, ViewAnswer
from isthmus.serving import columns, documentation, log, openapi, refusals
from isthmus.serving.lookup import Lookup
from isthmus.serving.messages import LookupRequest, ModelInput, Models, ModelState, PredictRequest, Ready
from isthmus.serving.metrics import REFUSAL, Metrics
from isthmus.serving.observe import Observed
from isthmus.serving.predictor import require_keys
from isthmus.serving.settings import METRICS_FOLDER, ServerSettings
from isthmus.serving.state import State
from isthmus.serving.store import Store
from isthmus.serving.watch import Watch

BODY_BYTES = 1 << 20

_LOOKUP = msgspec.json.Decoder(LookupRequest)
_PREDICT = msgspec.json.Decoder(PredictRequest)
_UP = orjson.dumps({"status": "up"})

T = TypeVar("T")


class Api:
    """The handlers of one server process, over its store and its state."""

    def __init__(self, settings: ServerSettings) -> None:
        self._now = settings.now
        self._store = Store(settings.redis)
        self._watch = Watch(Path(settings.contract), Path(settings.deployment))
        folder = os.environ.get(METRICS_FOLDER) if settings.workers > 1 else None
        self.metrics = Metrics(lambda: self._watch.state, self._at, Path(folder) if folder else None)
        self._document = orjson.dumps(openapi.document())

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Loads what is there, follows what changes, and closes the connections at the end."""
        self._watch.load()
        tasks = [asyncio.create_task(self._watch.run()), asyncio.create_task(self.metrics.share())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            self.metrics.close()
            await self._store.close()

    async def lookup(self, request: Request) -> Response:
        """Feast's online lookup."""
        asked = _decode(await _body(request), _LOOKUP)
        state = self._watch.state
        lookup = _find(state, asked)
        keys = columns.keys(asked.entities, state.join_keys)
        require_keys(lookup.plan, keys)
        rows = columns.rows("entities", keys)
        answers = await self._read(lookup.plan, keys, rows)
        return _answer(lookup.encode(keys, rows, answers), state.contract.hash)

    async def predict(self, request: Request) -> Response:
        """A prediction for each row of join keys and request fields."""
        asked = _decode(await _body(request), _PREDICT)
        state = self._watch.state
        predictor = state.predictor(asked.model)
        keys, fields, rows = predictor.read(asked.entities, asked.request, state.join_keys)
        answers = await self._read(predictor.plan, keys, rows) if predictor.plan.views else {}
        with self.metrics.run(predictor.model.deployment.model, rows):
            output = predictor.predict(fields, answers)
        return _answer(predictor.encode(output, answers), state.contract.hash)

    async def models(self, _request: Request) -> Response:
        """The deployed models."""
        state = self._watch.state
        model = state.model
        if model is None:
            return _answer(msgspec.json.encode(Models([], state.refused)))
        deployment = model.deployment
        described = ModelState(
            model=deployment.model,
            package=deployment.digest,
            contract=deployment.contract,
            service=deployment.service,
            precision=deployment.precision,
            threads=deployment.threads,
            deployed_at=deployment.deployed_at,
            current=deployment.contract == state.contract.hash,
            inputs=[ModelInput(item.name, item.dtype.name) for item in model.inputs],
        )
        return _answer(msgspec.json.encode(Models([described])))

    async def health(self, _request: Request) -> Response:
        """The process is up."""
        return _answer(_UP)

    async def ready(self, _request: Request) -> Response:
        """Whether lookups can be answered."""
        state = self._watch.state
        contract = state.contract
        await self._store.ping()
        model = state.model.deployment.model if state.model else None
        return _answer(msgspec.json.encode(Ready("ready", contract.project, contract.hash, model)), contract.hash)

    async def exposition(self, request: Request) -> Response:
        """The metrics, in the format that Prometheus asks for."""
        body, kind = self.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    async def openapi(self, _request: Request) -> Response:
        """The OpenAPI document."""
        return _answer(self._document)

    async def _read(self, plan: LookupPlan, keys: Mapping[str, Sequence[Any]], rows: int) -> dict[str, ViewAnswer]:
        answers = await self._store.read(plan, keys, rows, self._at())
        self.metrics.read(answers)
        return answers

    def _at(self) -> int:
        return clock.now() if self._now is None else self._now


def create(settings: ServerSettings | None = None) -> ASGIApp:
    """The application; without settings, those of the environment.

    Raises:
        ConfigurationError: the environment holds no settings.
    """
    log.configure()
    api = Api(settings or ServerSettings.from_environment())
    app = Starlette(
        routes=[
            Route("/get-online-features", api.lookup, methods=["POST"]),
            Route("/predict", api.predict, methods=["POST"]),
            Route("/models", api.models),
            Route("/healthz", api.health),
            Route("/readyz", api.ready),
            Route("/metrics", api.exposition),
            Route("/openapi.json", api.openapi),
            *documentation.routes(),
        ],
        lifespan=api.lifespan,
        exception_handlers={IsthmusError: _refuse, HTTPException: _no_route, Exception: _fail},
    )
    return Observed(app, api.metrics)


def _find(state: State, asked: LookupRequest) -> Lookup:
    """The compiled lookup of a request."""
    if (asked.features is None) == (asked.feature_service is None):
        found = "neither is given" if asked.features is None else "both are given"
        raise RequestError("features and feature_service", found, expected="one of the two")
    if asked.feature_service is not None:
        return state.service_lookup(asked.feature_service, asked.full_feature_names)
    return state.lookup(tuple(asked.features or ()), asked.full_feature_names)


async def _body(request: Request) -> bytes:
    """The body, read no further than it may be long."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > BODY_BYTES:
        raise _too_long()
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            raise _too_long()
    return body


def _too_long() -> refusals.TooLargeError:
    return refusals.TooLargeError("body", "is too long", expected=f"{BODY_BYTES:,} bytes at most")


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError("body", str(error).replace("$", "body"), expected="what /docs describes") from error
    except columns.UNREADABLE as error:
        raise refusals.UnreadableError("body", str(error), expected="JSON in UTF-8") from error


def _answer(body: bytes, contract: str | None = None) -> Response:
    return Response(body, media_type="application/json", headers={"isthmus-contract": contract} if contract else None)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, IsthmusError)  # noqa: S101 - Starlette passes what was asked for
    request.scope[REFUSAL] = type(error).__name__
    status = refusals.status(error)
    headers = {"retry-after": str(refusals.RETRY_SECONDS)} if status == 503 else None
    return Response(orjson.dumps(error.as_dict()), status, headers, media_type="application/json")


async def _fail(request: Request, _error: Exception) -> Response:
    """The answer to a defect of ours; the log says where it is."""
    return await _refuse(request, refusals.DefectError("server", "an unforeseen error", remedy="see the server's log"))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - Starlette passes what was asked for
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        refusal: IsthmusError = refusals.NotAllowedError(path, f"does not take {request.method}", expected=allowed)
        answer = await _refuse(request, refusal)
        answer.headers["allow"] = allowed
        return answer
    return await _refuse(request, refusals.NotFoundError(path, "is no path of this API", remedy="see /docs"))
