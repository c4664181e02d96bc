"""The ASGI application (`create`) and its `Handlers`: lookups, pushes, predictions and the state of the server."""

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from isthmus.features import clock
from isthmus.features.contract.schema import Column
from isthmus.features.errors import DamagedRowError, IsthmusError, RequestError
from isthmus.features.latency import WRITE_SECONDS, LatencyWriter
from isthmus.features.online.plan import ViewAnswer
from isthmus.serving import log
from isthmus.serving.http import push, snapshots
from isthmus.serving.http.generate import TextGeneration
from isthmus.serving.http.guard import Guarded, Limited, error_response, grants_of
from isthmus.serving.http.inference import Inference
from isthmus.serving.http.middleware import Observed
from isthmus.serving.http.predict import PredictCall, PredictionService, reader_for
from isthmus.serving.http.statuspage import deployed_models, page, status
from isthmus.serving.lookup.lookup import Lookup, LookupInputs, TransformOutputs
from isthmus.serving.metrics.gauges import ProductionGauges, SpoolGauges, StreamGauges
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.recorder.columns import RecordedAnswer, stored_entries
from isthmus.serving.recorder.options import MB
from isthmus.serving.recorder.recorder import ANSWER, Recorder
from isthmus.serving.redis.store import Store
from isthmus.serving.settings import METRICS_FOLDER, ServerSettings
from isthmus.serving.state import State
from isthmus.serving.threads import BYTES, VALUES, offload
from isthmus.serving.watch import Watch
from isthmus.serving.wire import decode, errors, messages, openapi
from isthmus.serving.wire.exchange import body_of, message_of, reply
from isthmus.serving.wire.formats import Format, negotiate

_LOOKUP = msgspec.json.Decoder(messages.LookupRequest)
_PREDICT = msgspec.json.Decoder(messages.PredictRequest)
_PUSH = msgspec.json.Decoder(messages.PushRequest)
_WRITE = msgspec.json.Decoder(messages.WriteRequest)
_HTML = {
    "content-type": "text/html; charset=utf-8",
    "cache-control": "no-store",
    # The page loads and runs nothing, even if a name contains HTML.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
}
_UP = orjson.dumps({"status": "up"})
LOOK_SECONDS = 1.0
"""Seconds between two checks for rows that Redis has lost."""


class Handlers:
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
        self.metrics.gauges.streams = StreamGauges(Path(settings.deployment).parent)
        latency = settings.latency
        self._latency = None if latency is None else LatencyWriter(Path(latency), objective, self.metrics.bounds)
        self._predictions = PredictionService(self._store, settings.limits, self.metrics, self._at)
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
        self.generations = TextGeneration(lambda: self._watch.state, self._predictions, self._limits, self._at, written)
        self.inference = Inference(
            lambda: self._watch.state, self._predictions, self._store, self._limits, self.metrics, self._predicted
        )
        self._document = orjson.dumps(openapi.document())

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """Load the contract and model and start the background tasks, before the first request. Clean up at the end.

        Makes garbage collection rare in this process, since it delays requests. At the end, stops the tasks, writes the
        recorded answers that are still in memory, and closes all connections.
        """
        self._watch.load()
        # Otherwise every full collection scans all loaded objects, which takes 30 ms.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)
        tasks = [
            asyncio.create_task(_restarted(work))
            for work in (
                self._watch.run,
                self.metrics.share,
                self._predictions.run_waiting,
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
        while True:
            with suppress(IsthmusError):  # requests report the error
                state = self._watch.state
                await self._store.check_losses(state.contract.project, state.stored)
            await asyncio.sleep(LOOK_SECONDS)

    async def _write_latency(self) -> None:
        failed = False
        while self._latency:
            try:
                # Use a thread because the file system may be slow.
                await asyncio.to_thread(self._latency.write, self.metrics.answered())
                failed = False
            except OSError as error:
                if not failed:
                    log.warning("latency not written", problem=error.strerror or str(error))
                failed = True
            await asyncio.sleep(WRITE_SECONDS)

    async def lookup(self, request: Request) -> Response:
        answer_format = negotiate(request.headers.get("accept", ""))
        body = await body_of(request)
        message = message_of(body, _LOOKUP)
        grants_of(request).require_lookup(message.feature_service, message.features)
        state = self._watch.state
        lookup = _compiled(state, message)
        keys, fields = await offload(
            len(body) > BYTES, decode.entities, message.entities, state.join_keys, lookup.request, lookup.optional
        )
        call = _LookupCall(lookup, lookup.inputs(keys, fields, self._limits), state.join_keys, answer_format)
        try:
            answer = await self._encoded(call)
        except DamagedRowError:
            # A value could not be decoded. Check every row and answer the undamaged ones.
            answer = await self._encoded(call, check=True)
        if self._lookups is not None:
            inputs = call.inputs
            request.scope[ANSWER] = self._lookups.lookup(
                lookup.plan, call.at, body, inputs.keys, inputs.rows, call.answers, call.computed
            )
        return reply(answer, state.contract.hash, answer_format.value)

    async def _encoded(self, call: "_LookupCall", *, check: bool = False) -> bytes:
        lookup, keys, rows = call.lookup, call.inputs.keys, call.inputs.rows
        call.at = self._at()
        answers: Mapping[str, ViewAnswer] = {}
        if lookup.plan.views:
            answers = call.answers = await self._store.read(lookup.plan, keys, rows, call.at, check=check)
            self.metrics.read(answers, lookup.bits)
        large = rows * len(lookup.names) > VALUES
        computed: TransformOutputs = {}
        if lookup.computes:
            computed = call.computed = await offload(large, lookup.compute, call.inputs.request, answers)
        match call.format:
            case Format.JSON:
                return await offload(large, lookup.encode, keys, rows, answers, computed)
            case Format.VALUES:
                return await offload(large, lookup.encode_values, keys, answers, computed)
            case Format.ARROW:
                # Import pyarrow in a thread, so that only the first request for it waits.
                waits = large or "pyarrow" not in sys.modules
                return await offload(waits, _stream, lookup, call.join_keys, keys, answers, computed)

    async def push(self, request: Request) -> Response:
        return await self._push(request, message_of(await body_of(request), _PUSH))

    async def write(self, request: Request) -> Response:
        """Handle `/write-to-online-store`, which Feast's remote online store calls. Adds no rows to offline tables."""
        return await self._push(request, message_of(await body_of(request), _WRITE))

    async def _push(self, request: Request, rows: messages.PushRequest | messages.WriteRequest) -> Response:
        grants_of(request).require("push", push.view_of(rows)[0])
        state = self._watch.state
        answer = await push.push(rows, state, self._store, self._limits, self._at())
        return reply(answer, state.contract.hash)

    async def predict(self, request: Request) -> Response:
        body = await body_of(request)
        state = self._watch.state
        try:
            message = message_of(body, _PREDICT)
            grants_of(request).require("predict", state.deployed(message.model).deployment.model)
            predictor, predicted = await self._predictions.predict(PredictCall(state, message, body))
            assert isinstance(predictor, Predictor)  # noqa: S101 - other predictors refuse such a request
            stored, outputs = predicted.stored, predicted.outputs
            answer = await offload(len(outputs) > VALUES, predictor.encode, outputs, stored.answers)
            if (reader := reader_for(self._predicted, "predict", predictor)) is not None:
                request.scope[ANSWER] = RecordedAnswer(
                    reader, stored.at, body, stored.keys, stored_entries(reader, stored.answers), stored.rows,
                    outputs, predicted.inputs,
                )  # fmt: skip
            return reply(answer, predictor.contract.hash)
        except RequestError as error:
            with suppress(IsthmusError):
                # Show an example only to callers who may use the model.
                grants_of(request).require("predict", state.deployed(None).deployment.model)
                if isinstance(deployed := state.predictor(), Predictor):
                    error.example = deployed.example
            raise

    async def snapshot(self, request: Request) -> Response:
        return await snapshots.answer(request, self._watch.state.contract.services, self._settings.snapshots)

    async def models(self, request: Request) -> Response:
        state = self._watch.state
        grants_of(request).require_status(state.model.deployment.model if state.model else None)
        return reply(msgspec.json.encode(messages.Models(deployed_models(state), state.refused)))

    async def status(self, request: Request) -> Response:
        grants_of(request).require_status()
        state = self._watch.state
        answer = await status(self._settings, state, self._store, self.metrics, self._at())
        if "text/html" not in request.headers.get("accept", ""):
            return reply(msgspec.json.encode(answer), state.contract.hash)
        return Response(page(answer), headers={**_HTML, "isthmus-contract": state.contract.hash})

    async def health(self, _request: Request) -> Response:
        return reply(_UP)

    async def ready(self, _request: Request) -> Response:
        state = self._watch.state
        contract = state.contract
        await self._store.ping(contract)
        await self._store.require_no_losses(contract.project, state.stored)
        model = state.model.deployment.model if state.model else None
        answer = messages.Ready("ready", contract.project, contract.hash, model)
        return reply(msgspec.json.encode(answer), contract.hash)

    async def exposition(self, request: Request) -> Response:
        """Handle `/metrics`. If Redis fails, its metrics keep their last values and `isthmus_ready` is 0."""
        grants_of(request).require_status()
        gauges = self.metrics.gauges
        try:
            state, at = self._watch.state, self._at()
            gauges.rows = await self._store.view_rows(state.contract.project, state.contract.views.values(), at)
            gauges.earlier = await self._store.view_rows(state.contract.project, state.earlier_views, at)
            await self._store.check_losses(state.contract.project, state.stored)
            gauges.lost = {view.name for view in state.stored if view.online_name in self._store.losses.views}
            gauges.ready = not self._store.refused
        except IsthmusError:
            gauges.ready = False
        model = self._watch.state.model
        # Use a thread because the file system may be slow.
        if gauges.production is not None and model is not None:
            await asyncio.to_thread(gauges.production.look, model.deployment.model)
        for part in (gauges.spool, gauges.streams):
            if part is not None:
                await asyncio.to_thread(part.look)
        body, kind = self.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    async def openapi(self, _request: Request) -> Response:
        return reply(self._document)

    def _at(self) -> int:
        return clock.now() if self._now is None else self._now


def create(settings: ServerSettings) -> ASGIApp:
    log.configure()
    handlers = Handlers(settings)
    routes = [
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
    ]
    limited = Limited(_Application(routes, handlers.lifespan), settings.limits)
    rate = settings.limits.requests_per_second
    keys = None if settings.keys is None else Path(settings.keys)
    unguarded = settings.loopback and not settings.require_keys
    guarded = Guarded(limited, keys, unguarded=unguarded, hosts=settings.hosts, rate=rate)
    named = [route for route in routes if isinstance(route, Route)]
    return Observed(guarded, handlers.metrics, named, handlers.recorder)


@dataclass(slots=True)
class _LookupCall:
    lookup: Lookup
    inputs: LookupInputs
    join_keys: Mapping[str, Column]
    format: Format
    at: int = 0
    answers: Mapping[str, ViewAnswer] = field(default_factory=dict)
    computed: TransformOutputs = field(default_factory=dict)


class _Application:
    """Starlette's router, with our error responses. A busy path is called directly, without the overhead of routing."""

    def __init__(self, routes: Sequence[BaseRoute], lifespan: Lifespan[Any]) -> None:
        self._router = Router(routes, redirect_slashes=False, lifespan=lifespan)
        self._busy = {
            route.path: route
            for route in routes
            if isinstance(route, Route) and "POST" in (route.methods or ()) and not route.param_convertors
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that the router raises an HTTPException for an unknown path or method
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        route = self._busy.get(scope["path"]) if scope["method"] == "POST" else None
        request, begun = Request(scope, receive), False

        async def begin(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            if route is None:
                await self._router(scope, receive, begin)
                return
            scope["route"] = route
            response = await route.endpoint(request)
        except ClientDisconnect:
            raise
        except Exception as error:
            if not begun and isinstance(error, IsthmusError):
                response = error_response(error, scope)
            elif not begun and isinstance(error, HTTPException):
                response = _no_route(request, error)
            else:
                # This is a bug: answer the caller unless an answer has begun, and let `Observed` log the place.
                defect = errors.DefectError("server", "unexpected error", remedy="see the server's log")
                answer = error_response(defect, scope)
                if not begun:
                    await answer(scope, receive, send)
                raise
        await response(scope, receive, send)


def _stream(*arguments: Any) -> bytes:
    from isthmus.serving.lookup.arrow import stream

    return stream(*arguments)


async def _restarted(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run background work until it is canceled. If it raises an exception, log it and start the work again."""
    while True:
        try:
            return await work()
        except Exception as error:  # noqa: BLE001 - requests must go on after any error
            log.warning("background work failed", exception=type(error).__name__, at=log.place(error))
        await asyncio.sleep(LOOK_SECONDS)


def _compiled(state: State, message: messages.LookupRequest) -> Lookup:
    if (message.features is None) == (message.feature_service is None):
        problem = "both are missing" if message.features is None else "both are present"
        raise RequestError("features and feature_service", problem, expected="one of the two")
    if message.feature_service is not None:
        return state.service_lookup(message.feature_service, message.full_feature_names)
    return state.lookup(tuple(message.features or ()), message.full_feature_names)


def _no_route(request: Request, error: HTTPException) -> Response:
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        refusal = errors.NotAllowedError(path, f"does not support {request.method}", expected=allowed)
        answer = error_response(refusal, request.scope)
        answer.headers["allow"] = allowed
        return answer
    return error_response(errors.NotFoundError(path, "is not a path of this API", remedy="see /docs"), request.scope)
