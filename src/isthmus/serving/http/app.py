"""The ASGI application: lookups, predictions and the state of the server."""

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.features import clock
from isthmus.features.contract.schema import Column
from isthmus.features.errors import DamagedRowError, IsthmusError, RequestError
from isthmus.features.latency import WRITE_SECONDS, LatencyWriter
from isthmus.features.online.plan import ViewAnswer
from isthmus.serving import log
from isthmus.serving.http import push, snapshots
from isthmus.serving.http.generate import Generations
from isthmus.serving.http.guard import Guarded, Limited, granted, refused
from isthmus.serving.http.inference import Inference
from isthmus.serving.http.middleware import Observed
from isthmus.serving.http.predict import PredictCall, Predictions, candidate_state, probation_state, recorded_by
from isthmus.serving.lookup import compact
from isthmus.serving.lookup.lookup import Lookup, TransformOutputs
from isthmus.serving.lookup.request import LookupInputs
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.metrics.production import ProductionGauges
from isthmus.serving.metrics.spool import SpoolGauges
from isthmus.serving.predict.model import Model
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.recorder.columns import Answer, stored_of
from isthmus.serving.recorder.options import MB
from isthmus.serving.recorder.recorder import ANSWER, Recorder
from isthmus.serving.redis.store import Store
from isthmus.serving.settings import METRICS_FOLDER, ServerSettings
from isthmus.serving.state import State
from isthmus.serving.statuspage.page import page
from isthmus.serving.statuspage.report import status
from isthmus.serving.threads import BYTES, VALUES, offload
from isthmus.serving.watch import Watch
from isthmus.serving.wire import decode, errors, messages, openapi
from isthmus.serving.wire.exchange import body_of, message_of, reply
from isthmus.serving.wire.formats import Format, negotiate
from isthmus.serving.wire.inference import DATATYPES

_LOOKUP = msgspec.json.Decoder(messages.LookupRequest)
_PREDICT = msgspec.json.Decoder(messages.PredictRequest)
_PUSH = msgspec.json.Decoder(messages.PushRequest)
_WRITE = msgspec.json.Decoder(messages.WriteRequest)
_HTML = {
    "content-type": "text/html; charset=utf-8",
    "cache-control": "no-store",
    # Nothing is loaded and nothing runs, whatever a name holds.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
}
_UP = orjson.dumps({"status": "up"})
LOOK_SECONDS = 1.0
"""Between two looks at what Redis has lost."""


class Handlers:
    """The handlers of one server process, over its store and its state."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._now = settings.now
        self._limits = settings.limits
        self._watch = Watch(Path(settings.contract), Path(settings.deployment), settings.public_key, settings.batch)
        self._store = Store(
            settings.redis, settings.limits, settings.check_share, lambda: self._watch.written,
            refuse=settings.missing == "refuse",
        )  # fmt: skip
        folder = os.environ.get(METRICS_FOLDER) if settings.workers > 1 else None
        objective = settings.latency_objective_ms
        self.metrics = Metrics(
            lambda: self._watch.state, self._at, Path(folder) if folder else None, objective,
            settings.freshness_objective_seconds, settings.history_seconds,
        )  # fmt: skip
        self.metrics.gauges.production = ProductionGauges(Path(settings.deployment))
        latency = settings.latency
        self._latency = None if latency is None else LatencyWriter(Path(latency), objective, self.metrics.bounds)
        self._predictions = Predictions(self._store, settings.limits, self.metrics, self._at)
        record, spool = settings.record, settings.spool
        if record is not None and spool is not None:
            self.metrics.gauges.spool = SpoolGauges(Path(spool), int(record.spool_mb * MB))
        self.recorder = None if record is None or spool is None else Recorder(
            record, Path(spool), bytes.fromhex(settings.spool_key), self.metrics.count_recorded,
            self.metrics.count_unrecorded,
        )  # fmt: skip
        self._lookups = self.recorder if record is not None and record.lookups else None
        self._predicted = self.recorder if record is not None and record.predictions else None
        written = self.recorder if record is not None and record.texts else None
        self.generations = Generations(lambda: self._watch.state, self._predictions, self._limits, self._at, written)
        self.inference = Inference(
            lambda: self._watch.state, self._predictions, self._store, self._limits, self._predicted
        )
        self._document = orjson.dumps(openapi.document())

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Loads the contract and the model, follows their files, and closes the connections at the end."""
        self._watch.load()
        # Without this, each full collection looks through everything that was loaded, for 30 ms.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)
        tasks = [
            asyncio.create_task(_kept_up(work))
            for work in (
                self._watch.run,
                self.metrics.share,
                self._predictions.shadow.run,
                self._write_latency,
                self._follow_rows,
            )
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            if self.recorder:
                await asyncio.to_thread(self.recorder.close)
            self.metrics.close()
            if self._latency:
                self._latency.close()
            await self._store.close()

    async def _follow_rows(self) -> None:
        """Check every second whether Redis has lost rows, until canceled."""
        while True:
            with suppress(IsthmusError):  # requests say so
                state = self._watch.state
                await self._store.look(state.contract.project, state.stored)
            await asyncio.sleep(LOOK_SECONDS)

    async def _write_latency(self) -> None:
        """Writes down every second how fast this process answers, until it is canceled."""
        failed = False
        while self._latency:
            try:
                # In a thread: a file system may be slow, and the event loop has requests to answer.
                await asyncio.to_thread(self._latency.write, self.metrics.answered())
                failed = False
            except OSError as error:
                if not failed:
                    log.warning("latency not told", problem=error.strerror or str(error))
                failed = True
            await asyncio.sleep(WRITE_SECONDS)

    async def lookup(self, request: Request) -> Response:
        """Feast's online lookup."""
        answer_format = negotiate(request.headers.get("accept", ""))
        body = await body_of(request)
        wanted = message_of(body, _LOOKUP)
        granted(request).require_lookup(wanted.feature_service, wanted.features)
        state = self._watch.state
        lookup = _compiled(state, wanted)
        keys, fields = await offload(
            len(body) > BYTES, decode.entities, wanted.entities, state.join_keys, lookup.request, lookup.optional
        )
        asked = _Asked(lookup, LookupInputs.of(lookup, keys, fields, self._limits), state.join_keys, answer_format)
        try:
            answer = await self._encoded(asked)
        except DamagedRowError:
            # Found while values were read: now each row is looked at, and the others are answered.
            answer = await self._encoded(asked, check=True)
        if self._lookups is not None:
            inputs = asked.inputs
            request.scope[ANSWER] = self._lookups.lookup(
                lookup.plan, asked.at, body, inputs.keys, inputs.rows, asked.answers, asked.computed
            )
        return reply(answer, state.contract.hash, answer_format.value)

    async def _encoded(self, asked: "_Asked", *, check: bool = False) -> bytes:
        """The body of the answer to a lookup; `check` looks at the content of every row."""
        lookup, keys, rows = asked.lookup, asked.inputs.keys, asked.inputs.rows
        asked.at = self._at()
        answers: Mapping[str, ViewAnswer] = {}
        if lookup.plan.views:
            answers = asked.answers = await self._store.read(lookup.plan, keys, rows, asked.at, check=check)
            self.metrics.read(answers, lookup.bits)
        large = rows * len(lookup.names) > VALUES
        computed: TransformOutputs = {}
        if lookup.computes:
            computed = asked.computed = await offload(large, lookup.compute, asked.inputs.request, answers)
        match asked.format:
            case Format.JSON:
                return await offload(large, lookup.encode, keys, rows, answers, computed)
            case Format.VALUES:
                return await offload(large, compact.values, lookup, keys, answers, computed)
            case Format.ARROW:
                # The first to ask waits for the library, in a thread: nobody else does.
                waits = large or "pyarrow" not in sys.modules
                return await offload(waits, _stream, lookup, asked.join_keys, keys, answers, computed)

    async def push(self, request: Request) -> Response:
        """Feast's push of rows to the online store."""
        return await self._push(request, message_of(await body_of(request), _PUSH))

    async def write(self, request: Request) -> Response:
        """A push as Feast's remote online store sends it."""
        return await self._push(request, message_of(await body_of(request), _WRITE))

    async def _push(self, request: Request, rows: messages.PushRequest | messages.WriteRequest) -> Response:
        granted(request).require("push", push.view_of(rows)[0])
        state = self._watch.state
        answer = await push.push(rows, state, self._store, self._limits, self._at())
        return reply(answer, state.contract.hash)

    async def predict(self, request: Request) -> Response:
        """Predictions for rows of join keys and request fields."""
        body = await body_of(request)
        state = self._watch.state
        try:
            wanted = message_of(body, _PREDICT)
            granted(request).require("predict", state.deployed(wanted.model).deployment.model)
            answer, predictor, predicted = await self._predictions.answer(PredictCall(state, wanted, body))
            if (reader := recorded_by(self._predicted, "predict", predictor)) is not None:
                stored = predicted.stored
                request.scope[ANSWER] = Answer(
                    reader, stored.at, body, stored.keys, stored_of(reader, stored.answers), stored.rows,
                    predicted.outputs, predicted.inputs,
                )  # fmt: skip
            return reply(answer, predictor.contract.hash)
        except RequestError as error:
            with suppress(IsthmusError):
                # Only whoever may ask the model learns what it reads.
                granted(request).require("predict", state.deployed(None).deployment.model)
                if isinstance(deployed := state.predictor(), Predictor):
                    error.example = deployed.example
            raise

    async def snapshot(self, request: Request) -> Response:
        """The stored features of a service that devices keep, or those of an owner."""
        return await snapshots.answer(request, self._watch.state.contract.services, self._settings.snapshots)

    async def models(self, request: Request) -> Response:
        """The deployed models."""
        state = self._watch.state
        granted(request).require_status(state.model.deployment.model if state.model else None)
        return reply(msgspec.json.encode(messages.Models(_models(state), state.refused)))

    async def status(self, request: Request) -> Response:
        """The status of the server and its project: a page for a browser, JSON for everybody else."""
        granted(request).require_status()
        state = self._watch.state
        answer = await status(self._settings, state, self._store, self.metrics, _models(state), self._at())
        if "text/html" not in request.headers.get("accept", ""):
            return reply(msgspec.json.encode(answer), state.contract.hash)
        return Response(page(answer), headers={**_HTML, "isthmus-contract": state.contract.hash})

    async def health(self, _request: Request) -> Response:
        """Answers as long as the process is up."""
        return reply(_UP)

    async def ready(self, _request: Request) -> Response:
        """Whether lookups can be answered."""
        state = self._watch.state
        contract = state.contract
        await self._store.ping(contract)
        await self._store.require_whole(contract.project, state.stored)
        model = state.model.deployment.model if state.model else None
        answer = messages.Ready("ready", contract.project, contract.hash, model)
        return reply(msgspec.json.encode(answer), contract.hash)

    async def exposition(self, request: Request) -> Response:
        """The metrics, in the format that Prometheus asks for; while Redis is away, with what it said last."""
        granted(request).require_status()
        gauges = self.metrics.gauges
        try:
            state, at = self._watch.state, self._at()
            gauges.rows = await self._store.rows(state.contract.project, state.contract.views.values(), at)
            gauges.earlier = await self._store.rows(state.contract.project, state.earlier_views, at)
            await self._store.look(state.contract.project, state.stored)
            gauges.lost = {view.name for view in state.stored if view.online_name in self._store.losses.views}
            gauges.ready = not self._store.refused
        except IsthmusError:
            gauges.ready = False
        model = self._watch.state.model
        # In a thread: a file system may be slow, and the event loop has requests to answer.
        if gauges.production is not None and model is not None:
            await asyncio.to_thread(gauges.production.look, model.deployment.model)
        if gauges.spool is not None:
            await asyncio.to_thread(gauges.spool.look)
        body, kind = self.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    async def openapi(self, _request: Request) -> Response:
        """The OpenAPI document."""
        return reply(self._document)

    def _at(self) -> int:
        return clock.now() if self._now is None else self._now


def create(settings: ServerSettings) -> ASGIApp:
    """The application of a server process."""
    log.configure()
    handlers = Handlers(settings)
    app = Starlette(
        routes=[
            Route("/get-online-features", handlers.lookup, methods=["POST"]),
            Route("/push", handlers.push, methods=["POST"]),
            Route("/write-to-online-store", handlers.write, methods=["POST"]),
            Route("/predict", handlers.predict, methods=["POST"]),
            Route("/generate", handlers.generations.answer, methods=["POST"]),
            *handlers.inference.routes(),
            Route("/snapshots/{service}", handlers.snapshot),
            Route(f"/snapshots/{{service}}/{{value:{snapshots.OWNER}}}", handlers.snapshot),
            Route("/models", handlers.models),
            Route("/status", handlers.status),
            Route("/healthz", handlers.health),
            Route("/readyz", handlers.ready),
            Route("/metrics", handlers.exposition),
            Route("/openapi.json", handlers.openapi),
            *openapi.docs_routes(),
        ],
        lifespan=handlers.lifespan,
        exception_handlers={IsthmusError: _refuse, HTTPException: _no_route, Exception: _fail},
    )
    app.router.redirect_slashes = False
    routes = [route for route in app.routes if isinstance(route, Route)]
    busy = [route for route in routes if "POST" in (route.methods or ()) and not route.param_convertors]
    limited = Limited(_Direct(app, busy), settings.limits)
    rate = settings.limits.requests_per_second
    keys = None if settings.keys is None else Path(settings.keys)
    unguarded = settings.loopback and not settings.require_keys
    guarded = Guarded(limited, keys, unguarded=unguarded, hosts=settings.hosts, rate=rate)
    return Observed(guarded, handlers.metrics, routes, handlers.recorder)


@dataclass(slots=True)
class _Asked:
    """A lookup whose request has been read; then its present, and what it rests on."""

    lookup: Lookup
    inputs: LookupInputs
    join_keys: Mapping[str, Column]
    format: Format
    at: int = 0
    answers: Mapping[str, ViewAnswer] = field(default_factory=dict)
    computed: TransformOutputs = field(default_factory=dict)


class _Direct:
    """The busy routes, without what Starlette does on the way to them; none has parameters in its path."""

    def __init__(self, app: ASGIApp, routes: Iterable[Route]) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(request)
        except IsthmusError as error:
            response = refused(error, scope)
        except ClientDisconnect:
            raise
        except Exception as error:
            # A defect of ours: the caller gets an answer, and `Observed` logs the place.
            await (await _fail(request, error))(scope, receive, send)
            raise
        await response(scope, receive, send)


def _stream(*answered: Any) -> bytes:
    from isthmus.serving.lookup.arrow import stream

    return stream(*answered)


def _models(state: State) -> list[messages.ModelState]:
    model = state.model
    if model is None:
        return []
    deployment, outdated, undone = model.deployment, state.outdated, model.deployment.undone
    return [
        messages.ModelState(
            model=deployment.model,
            package=deployment.digest,
            contract=deployment.contract,
            service=deployment.service,
            precision=deployment.precision,
            threads=deployment.threads,
            deployed_at=deployment.deployed_at,
            current=outdated is None,
            # An input that both the model and a request transform read is listed once.
            inputs=list(dict.fromkeys(messages.ModelInput(item.name, item.dtype.name) for item in model.inputs)),
            outdated=None if outdated is None else str(outdated),
            candidate=msgspec.UNSET if state.candidate_run is None else candidate_state(state.candidate_run),
            probation=msgspec.UNSET if state.probation is None else probation_state(state.probation),
            undone=msgspec.UNSET if undone is None else messages.UndoneState(undone.digest, undone.why),
            **_tensors(model),
        )
    ]


def _tensors(model: Model) -> dict[str, Any]:
    """What `/models` says of a model of tensors alone."""
    if model.inputs:
        return {}
    return {
        name: [messages.ModelTensor(item.name, DATATYPES[item.element], list(item.shape)) for item in tensors]
        for name, tensors in (("tensors", model.manifest.tensors), ("outputs", model.manifest.outputs))
    } | {"max_sizes": model.manifest.variant(model.deployment.precision).most}


async def _kept_up(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run background work until canceled. Restart it after an unexpected exception."""
    while True:
        try:
            return await work()
        except Exception as error:  # noqa: BLE001 - whatever it is, requests go on
            log.warning("background work failed", exception=type(error).__name__, at=log.place(error))
        await asyncio.sleep(LOOK_SECONDS)


def _compiled(state: State, wanted: messages.LookupRequest) -> Lookup:
    if (wanted.features is None) == (wanted.feature_service is None):
        problem = "neither is given" if wanted.features is None else "both are given"
        raise RequestError("features and feature_service", problem, expected="one of the two")
    if wanted.feature_service is not None:
        return state.service_lookup(wanted.feature_service, wanted.full_feature_names)
    return state.lookup(tuple(wanted.features or ()), wanted.full_feature_names)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, IsthmusError)  # noqa: S101 - Starlette passes what this handler is registered for
    return refused(error, request.scope)


async def _fail(request: Request, _error: Exception) -> Response:
    return refused(errors.DefectError("server", "an unforeseen error", remedy="see the server's log"), request.scope)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - Starlette passes what this handler is registered for
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        refusal = errors.NotAllowedError(path, f"does not take {request.method}", expected=allowed)
        answer = refused(refusal, request.scope)
        answer.headers["allow"] = allowed
        return answer
    return refused(errors.NotFoundError(path, "is no path of this API", remedy="see /docs"), request.scope)
