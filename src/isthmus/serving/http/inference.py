"""`Inference`: routes of the Open Inference Protocol, version 2, for models that take tensors, and for health."""

from collections.abc import Callable, Sequence
from importlib.metadata import version

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from isthmus.features.errors import RequestError, one_of
from isthmus.package.manifest import TensorInfo
from isthmus.serving.http.guard import grants_of
from isthmus.serving.http.predict import PredictCall, PredictionService, reader_for
from isthmus.serving.limits import Limits
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.predict.tensors import TensorPredictor, require_elements
from isthmus.serving.recorder.columns import RecordedAnswer
from isthmus.serving.recorder.recorder import ANSWER, Recorder
from isthmus.serving.redis.store import Store
from isthmus.serving.state import AnyPredictor, State
from isthmus.serving.threads import BYTES, VALUES, offload
from isthmus.serving.wire import inference as wire
from isthmus.serving.wire.errors import NotFoundError
from isthmus.serving.wire.exchange import body_of, message_of, reply
from isthmus.serving.wire.formats import Format

_REQUEST = msgspec.json.Decoder(wire.InferRequest)
_INDEX = msgspec.json.Decoder(wire.RepositoryIndexRequest)
_BINARY = "application/octet-stream"


class Inference:
    def __init__(
        self, state: Callable[[], State], predictions: PredictionService, store: Store, limits: Limits,
        metrics: Metrics, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self._state, self._predictions, self._store, self._limits = state, predictions, store, limits
        self._metrics, self._recorder = metrics, recorder

    def routes(self) -> list[Route]:
        routes = [
            Route("/v2", self.server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route(wire.INDEX, self.index, methods=["POST"]),
            *(Route(path, self.change, methods=["POST"]) for path in wire.CHANGES),
            *(Route(path, self.statistics) for path in wire.STATISTICS),
        ]
        for path in (wire.MODEL, wire.VERSION):
            routes.append(Route(path, self.model))
            routes.append(Route(f"{path}/ready", self.model_ready))
            routes.append(Route(f"{path}/config", self.configuration))
            routes.append(Route(f"{path}/infer", self.infer, methods=["POST"]))
        return routes

    async def server(self, _request: Request) -> Response:
        return _encoded(wire.ServerMetadata("isthmus", version("isthmus"), list(wire.EXTENSIONS)))

    async def live(self, _request: Request) -> Response:
        return _encoded(wire.ServerLive(live=True))

    async def ready(self, _request: Request) -> Response:
        state = self._state()
        contract = state.contract
        await self._store.ping(contract)
        await self._store.require_no_losses(contract.project, state.stored)
        if state.is_deployed:
            state.predictor()
        return _encoded(wire.ServerReady(live=True, ready=True), contract.hash)

    async def model(self, request: Request) -> Response:
        grants_of(request).require_status(request.path_params["model"])
        state = self._state()
        predictor = _tensors_of(state, request)
        manifest = predictor.model.manifest
        metadata = wire.ModelMetadata(
            name=predictor.model.deployment.model,
            versions=list(state.versions()),
            platform=wire.PLATFORM,
            inputs=_described(manifest.tensors),
            outputs=_described(manifest.outputs, manifest.classes, several=manifest.several),
        )
        return _encoded(metadata, predictor.contract.hash)

    async def model_ready(self, request: Request) -> Response:
        grants_of(request).require_status(request.path_params["model"])
        predictor = _predictor_of(self._state(), request)
        return _encoded(wire.ModelReady(predictor.model.deployment.model, ready=True), predictor.contract.hash)

    async def configuration(self, request: Request) -> Response:
        grants_of(request).require_status(request.path_params["model"])
        predictor = _tensors_of(self._state(), request)
        manifest, deployment = predictor.model.manifest, predictor.model.deployment
        tensors, outputs = (_configured(part) for part in (manifest.tensors, manifest.outputs))
        configuration = wire.ModelConfiguration(
            name=deployment.model,
            default_model_filename=manifest.served(deployment.precision, deployment.device).file,
            input=tensors,
            output=outputs,
            instance_group=[{"kind": "KIND_CPU" if deployment.device == "cpu" else "KIND_GPU", "count": 1}],
            parameters={"intra_op_thread_count": {"string_value": str(deployment.threads)}},
        )
        return _encoded(configuration, predictor.contract.hash)

    async def statistics(self, request: Request) -> Response:
        state, name = self._state(), request.path_params.get("model")
        grants_of(request).require_status(name or (state.model.deployment.model if state.model else None))
        deployed = [state.deployed(name).deployment.model] if name or state.model else []
        return _encoded(wire.Statistics([*map(self._metrics.statistics, deployed)]))

    async def index(self, request: Request) -> Response:
        """Handle Triton's repository index: the deployed package and packages on trial, and whether they can answer."""
        state = self._state()
        grants_of(request).require_status(state.model.deployment.model if state.model else None)
        message = message_of(await body_of(request) or b"{}", _INDEX)
        entries = [
            wire.RepositoryEntry(deployment.model, deployment.digest, "UNAVAILABLE" if why else "READY", why)
            for deployment, why in state.version_states()
            if not (message.ready and why)
        ]
        return reply(msgspec.json.encode(entries))

    async def change(self, request: Request) -> Response:
        raise RequestError(f"model {request.path_params['model']!r:.80}", "cannot be loaded or unloaded by a request",
                           expected="a package that was verified",
                           remedy="use `isthmus deploy` or `isthmus deploy rollback`")  # fmt: skip

    async def infer(self, request: Request) -> Response:
        state = self._state()
        grants_of(request).require("predict", state.deployed(request.path_params["model"]).deployment.model)
        predictor: AnyPredictor = _tensors_of(state, request)
        version = predictor if "version" in request.path_params else None
        if (coding := request.headers.get("content-encoding", "identity")) != "identity":
            raise RequestError("Content-Encoding", f"is {coding!r:.40}", expected="a body that is not compressed")
        body = await body_of(request)
        length = _json_length(request.headers.getlist(wire.HEADER), len(body))
        text = body[:length]
        message = await offload(length > BYTES, message_of, text, _REQUEST)
        tensors = wire.TensorRequest(message, memoryview(body)[length:])
        call = PredictCall(state, tensors, body, version)
        predictor, predicted = await self._predictions.predict(call)
        assert isinstance(predictor, TensorPredictor)  # noqa: S101 - other predictors refuse such a request
        # Output dimensions that no input has are known only now.
        require_elements("outputs", (array.shape for array in predicted.outputs.values()), self._limits)
        elements = sum(array.size for array in predicted.outputs.values())
        content, json = await offload(elements > VALUES, predictor.encode, predicted.outputs, message)
        if (reader := reader_for(self._recorder, "infer", predictor)) is not None:
            size = sum(array.nbytes for array in predicted.outputs.values())
            request.scope[ANSWER] = RecordedAnswer(
                reader, predicted.stored.at, body, {}, [], 1, predicted.outputs, json=length % len(body), size=size
            )
        if json is None:
            return reply(content, predictor.contract.hash)
        more = ((wire.HEADER.lower().encode(), b"%d" % json),)
        return reply(content, predictor.contract.hash, _BINARY, more)


def _predictor_of(state: State, request: Request) -> AnyPredictor:
    state.deployed(request.path_params["model"])
    name = request.path_params.get("version")
    if name is None:
        return state.predictor()
    versions = state.versions()
    if name not in versions:
        raise NotFoundError("version", f"no version {name!r:.80}", expected=one_of(versions))
    return versions[name]


def _tensors_of(state: State, request: Request) -> TensorPredictor:
    predictor = _predictor_of(state, request)
    if not isinstance(predictor, TensorPredictor):
        raise NotFoundError(f"model {predictor.model.deployment.model}", "takes rows of features, not tensors",
                            expected="a model of tensors", remedy="use /predict")  # fmt: skip
    return predictor


def _json_length(headers: Sequence[str], length: int) -> int:
    if not headers:
        return length
    header = ", ".join(headers)
    if not (header.isascii() and header.isdigit() and len(header) < 20 and int(header) <= length):
        raise RequestError(wire.HEADER, f"is {header!r:.40}", expected=f"a number of bytes up to the body's {length:,}")
    return int(header)


def _configured(tensors: Sequence[TensorInfo]) -> list[wire.TensorConfiguration]:
    kinds = {"BYTES": "STRING"}
    return [
        wire.TensorConfiguration(tensor.name, f"TYPE_{kinds.get(tensor.datatype, tensor.datatype)}", tensor.shape)
        for tensor in _described(tensors)
    ]


def _described(
    tensors: Sequence[TensorInfo], classes: Sequence[str] = (), *, several: bool = False
) -> list[wire.TensorMetadata]:
    parameters: dict[str, list[str] | bool] = {"classes": [*classes]} if classes else {}
    return [
        wire.TensorMetadata(
            tensor.name,
            wire.DATATYPES[tensor.element],
            [size if isinstance(size, int) else -1 for size in tensor.shape],
            parameters | ({"several": True} if several else {}),
        )
        for tensor in tensors
    ]


def _encoded(message: msgspec.Struct, contract: str | None = None) -> Response:
    return reply(msgspec.json.encode(message), contract, Format.JSON.value)
