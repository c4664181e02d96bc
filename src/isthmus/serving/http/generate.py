"""`/generate`: stream text as server-sent events (https://html.spec.whatwg.org, section 9.2)."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from isthmus.features.errors import IsthmusError
from isthmus.package.generation.decoder import StepOutput
from isthmus.package.generation.prompt import Generation
from isthmus.package.generation.tokenizer import LONG, GrowingText, Tokenizer
from isthmus.serving.deadlines import DEADLINE, REFUSAL
from isthmus.serving.http.guard import grants_of
from isthmus.serving.http.predict import PredictionService, reader_for
from isthmus.serving.limits import Limits
from isthmus.serving.predict.generator import Generator
from isthmus.serving.recorder.columns import RecordedAnswer, stored_entries
from isthmus.serving.recorder.recorder import ANSWER, Recorder
from isthmus.serving.state import State
from isthmus.serving.threads import start_task
from isthmus.serving.wire.errors import BusyError, DefectError
from isthmus.serving.wire.exchange import body_of, message_of
from isthmus.serving.wire.messages import EventEnd, EventText, GenerateRequest

_REQUEST = msgspec.json.Decoder(GenerateRequest)
EVENTS = "text/event-stream"
T = TypeVar("T")


class TextGeneration:
    def __init__(
        self, state: Callable[[], State], predictions: PredictionService, limits: Limits, now: Callable[[], int],
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self._state, self._predictions, self._limits, self._now = state, predictions, limits, now
        self._recorder = recorder
        self._under_way = 0
        self._tokenizing = asyncio.Lock()

    async def answer(self, request: Request) -> Response:
        """Handle `/generate`: generate the first token, and return a response that streams the text as events.

        An error before the first token is raised and becomes the response, such as BusyError if too many texts are
        being generated. A later error is sent as an event, since the response has already begun.
        """
        body = await body_of(request)
        message, state = message_of(body, _REQUEST), self._state()
        grants_of(request).require("predict", state.deployed(message.model).deployment.model)
        generator = state.generator(message.model)
        if self._under_way >= self._limits.generations:
            raise BusyError("server", f"{self._under_way:,} texts are being generated",
                            remedy="try again, or raise server.limits.generations or server.workers")  # fmt: skip
        self._under_way += 1
        try:
            call = await _while_connected(request.receive, self._begun(state, generator, message, body))
        except BaseException:
            self._under_way -= 1
            raise
        if call.answer is not None:
            request.scope[ANSWER] = call.answer
        return _Stream(generator, call, self._limits, self._end)

    async def _begun(
        self, state: State, generator: Generator, message: GenerateRequest, body: bytes
    ) -> "_GenerateCall":
        inputs, at = state.prompt.read(message, self._limits), self._now()
        answers = await self._predictions.stored(state.prompt.plan, inputs.keys, 1, at, state.prompt.bits)
        features = state.prompt.features(inputs.request, answers)
        parts = generator.generation.parts(message.prompt, features)
        prompt = await tokens_of(generator.generation, generator.tokenizer, parts, self._tokenizing)
        room = generator.room(prompt, message.max_tokens, self._limits)
        tokens = generator.tokens(prompt, room)
        call = _GenerateCall(prompt, room, tokens, await anext(tokens))
        if reader := reader_for(self._recorder, "generate", generator.predictor, state.prompt.plan):
            stored = stored_entries(reader, answers)
            call.answer = RecordedAnswer(reader, at, body, inputs.keys, stored, 1, (prompt, call.generated))
        return call

    def _end(self) -> None:
        self._under_way -= 1


async def tokens_of(
    generation: Generation, tokenizer: Tokenizer, parts: Sequence[str | int], turn: asyncio.Lock
) -> list[int]:
    """Tokenize the parts of a prompt without blocking the event loop; return the token ids to feed the model.

    A long prompt is tokenized in a thread, which continues even if the caller is canceled. The lock `turn` lets only
    one such thread run at a time. Raises RequestError if the prompt cannot be tokenized, or certainly exceeds the
    model's context. The result can still be too long, so check its length.
    """
    if sum(len(part) for part in parts if isinstance(part, str)) <= LONG:
        return tokenizer.encode(parts, generation.context)
    await turn.acquire()
    reading = start_task(asyncio.to_thread(tokenizer.encode, parts, generation.context))
    reading.add_done_callback(lambda _: turn.release())
    return await asyncio.shield(reading)


@dataclass(slots=True)
class _GenerateCall:
    """A text in progress: `room` tokens may be generated, and `generated` are the ones sent so far."""

    prompt: Sequence[int]
    room: int
    tokens: AsyncIterator[StepOutput]
    first: StepOutput
    generated: list[int] = field(default_factory=list)
    answer: RecordedAnswer | None = None


class _Stream(Response):
    """The events of a text. The stream ends with the text, or when the client disconnects."""

    def __init__(self, generator: Generator, call: _GenerateCall, limits: Limits, end: Callable[[], None]) -> None:
        self.status_code, self.background = 200, None
        self._generator, self._call, self._limits, self._end = generator, call, limits, end
        contract = generator.predictor.contract.hash.encode()
        self.raw_headers = [
            (b"content-type", EVENTS.encode()), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"),
            (b"isthmus-contract", contract),
        ]  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope[DEADLINE].release()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _while_connected(receive, self._send(scope, send))
        finally:
            self._end()
            if (answer := self._call.answer) is not None:
                # Python lists take about 32 bytes per token.
                answer.size = 32 * (len(self._call.prompt) + len(self._call.generated))

    async def _send(self, scope: Scope, send: Send) -> None:
        try:
            async for event in self._events():
                await send(_body(event))
        except IsthmusError as error:
            scope[REFUSAL] = type(error).__name__
            await send(_body(_event("error", error.as_dict())))
        except Exception:
            defect = DefectError("server", "unexpected error", remedy="see the server's log")
            scope[REFUSAL] = type(defect).__name__
            await send(_body(_event("error", defect.as_dict())))
            await send(_body(b"", more=False))
            raise  # so that the place is logged
        await send(_body(b"", more=False))

    async def _events(self) -> AsyncIterator[bytes]:
        text, call = GrowingText(self._generator.tokenizer), self._call
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.generation_seconds
        reason: Literal["end", "length", "time"] = "length"
        async with aclosing(_chained(call)) as tokens:
            async for read in tokens:
                call.generated.append(read.token)
                if read.token in self._generator.generation.end:
                    reason = "end"
                    break
                if piece := text.add(read.token):
                    yield _event("text", msgspec.to_builtins(EventText(piece)))
                if loop.time() > until and len(call.generated) < call.room:
                    reason = "time"
                    break
        if piece := text.end():
            yield _event("text", msgspec.to_builtins(EventText(piece)))
        yield _event("end", msgspec.to_builtins(EventEnd(reason, len(call.prompt), len(call.generated))))


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _chained(call: _GenerateCall) -> AsyncGenerator[StepOutput]:
    yield call.first
    async for read in call.tokens:
        yield read


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result. If the client disconnects first, cancel it and raise ClientDisconnect."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(kind: str, data: Mapping[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))
