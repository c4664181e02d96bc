"""`/generate`: text as it comes, as server-sent events (https://html.spec.whatwg.org, section 9.2)."""

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
from isthmus.package.generation.decoder import Read
from isthmus.package.generation.prompt import Generation
from isthmus.package.generation.tokenizer import LONG, Text, Tokenizer
from isthmus.serving.deadlines import DEADLINE, REFUSAL
from isthmus.serving.http.guard import granted
from isthmus.serving.http.predict import Predictions
from isthmus.serving.limits import Limits
from isthmus.serving.predict.generator import Generator
from isthmus.serving.recorder.columns import Answer, stored_of
from isthmus.serving.recorder.recorder import ANSWER, Recorder
from isthmus.serving.state import State
from isthmus.serving.wire.errors import BusyError, DefectError
from isthmus.serving.wire.exchange import body_of, message_of
from isthmus.serving.wire.messages import EventEnd, EventText, GenerateRequest

_REQUEST = msgspec.json.Decoder(GenerateRequest)
EVENTS = "text/event-stream"
T = TypeVar("T")


class Generations:
    """The texts that a server process generates."""

    def __init__(
        self, state: Callable[[], State], predictions: Predictions, limits: Limits, now: Callable[[], int],
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self._state, self._predictions, self._limits, self._now = state, predictions, limits, now
        self._recorder = recorder
        self._under_way = 0
        self._tokenizing = asyncio.Lock()

    async def answer(self, request: Request) -> Response:
        """The text behind a prompt.

        The first token has the time of any request. What is wrong before it is answered with a status; what goes wrong
        behind it, with an event.
        """
        body = await body_of(request)
        wanted, state = message_of(body, _REQUEST), self._state()
        granted(request).require("predict", state.deployed(wanted.model).deployment.model)
        generator = state.generator(wanted.model)
        if self._under_way >= self._limits.generations:
            raise BusyError("server", f"{self._under_way:,} texts are being generated",
                            remedy="try again, or raise server.limits.generations or server.workers")  # fmt: skip
        self._under_way += 1
        try:
            asked = await _while_there(request.receive, self._begun(state, generator, wanted, body))
        except BaseException:
            self._under_way -= 1
            raise
        if asked.answer is not None:
            request.scope[ANSWER] = asked.answer
        return _Stream(generator, asked, self._limits, self._end)

    async def _begun(self, state: State, generator: Generator, wanted: GenerateRequest, body: bytes) -> "_Asked":
        """A text with its first token."""
        inputs, at = state.prompt.read(wanted, self._limits), self._now()
        answers = await self._predictions.stored(state.prompt, inputs.keys, 1, at=at)
        features = state.prompt.features(inputs.request, answers)
        parts = generator.generation.parts(wanted.prompt, features)
        prompt = await tokens_of(generator.generation, generator.tokenizer, parts, self._tokenizing)
        room = generator.room(prompt, wanted.max_tokens, self._limits)
        tokens = generator.tokens(prompt, room)
        asked = _Asked(prompt, room, tokens, await anext(tokens))
        deployment, recorder = generator.predictor.model.deployment, self._recorder
        variant = f"{deployment.precision}/{deployment.threads}"
        if recorder and (reader := recorder.reader("generate", state.prompt.plan, deployment.digest, variant)):
            stored = stored_of(reader, answers)
            asked.answer = Answer(reader, at, body, inputs.keys, stored, 1, (prompt, asked.generated))
        return asked

    def _end(self) -> None:
        self._under_way -= 1


async def tokens_of(
    generation: Generation, tokenizer: Tokenizer, parts: Sequence[str | int], turn: asyncio.Lock
) -> list[int]:
    """Return the tokens of a prompt.

    A thread reads a long one, in its turn: tokenizing cannot be stopped, so requests that time out or leave while they
    wait never start it, and one thread at most is behind a caller who has left.
    """
    if sum(len(part) for part in parts if isinstance(part, str)) <= LONG:
        return tokenizer.encode(parts, generation.context)
    await turn.acquire()
    reading = asyncio.ensure_future(asyncio.to_thread(tokenizer.encode, parts, generation.context))
    reading.add_done_callback(lambda _: turn.release())
    # If the caller of a prompt has left, no one reads the error.
    reading.add_done_callback(lambda reading: reading.cancelled() or reading.exception())
    return await asyncio.shield(reading)


@dataclass(slots=True)
class _Asked:
    """The tokens of a prompt, the room behind them, what follows, of which the first is there, and those sent.

    `answer` is what is recorded of it, if anything is.
    """

    prompt: Sequence[int]
    room: int
    tokens: AsyncIterator[Read]
    first: Read
    generated: list[int] = field(default_factory=list)
    answer: Answer | None = None


class _Stream(Response):
    """The events of a text. It ends with the text, or when its reader leaves."""

    def __init__(self, generator: Generator, asked: _Asked, limits: Limits, end: Callable[[], None]) -> None:
        self.status_code, self.background = 200, None
        self._generator, self._asked, self._limits, self._end = generator, asked, limits, end
        contract = generator.predictor.contract.hash.encode()
        self.raw_headers = [
            (b"content-type", EVENTS.encode()), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"),
            (b"isthmus-contract", contract),
        ]  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events as they come."""
        try:
            scope[DEADLINE].release()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _while_there(receive, self._send(scope, send))
        finally:
            self._end()
            if (answer := self._asked.answer) is not None:
                # Numbers of tokens: some bytes each, as lists have them.
                answer.size = 32 * (len(self._asked.prompt) + len(self._asked.generated))

    async def _send(self, scope: Scope, send: Send) -> None:
        try:
            async for event in self._events():
                await send(_body(event))
        except IsthmusError as error:
            scope[REFUSAL] = type(error).__name__
            await send(_body(_event("error", error.as_dict())))
        except Exception:
            defect = DefectError("server", "an unforeseen error", remedy="see the server's log")
            scope[REFUSAL] = type(defect).__name__
            await send(_body(_event("error", defect.as_dict())))
            await send(_body(b"", more=False))
            raise  # the log has where
        await send(_body(b"", more=False))

    async def _events(self) -> AsyncIterator[bytes]:
        text, asked = Text(self._generator.tokenizer), self._asked
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.generation_seconds
        reason: Literal["end", "length", "time"] = "length"
        async with aclosing(_chained(asked)) as tokens:
            async for read in tokens:
                asked.generated.append(read.token)
                if read.token in self._generator.generation.end:
                    reason = "end"
                    break
                if piece := text.add(read.token):
                    yield _event("text", msgspec.to_builtins(EventText(piece)))
                if loop.time() > until and len(asked.generated) < asked.room:
                    reason = "time"
                    break
        if piece := text.end():
            yield _event("text", msgspec.to_builtins(EventText(piece)))
        yield _event("end", msgspec.to_builtins(EventEnd(reason, len(asked.prompt), len(asked.generated))))


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _chained(asked: _Asked) -> AsyncGenerator[Read]:
    yield asked.first
    async for read in asked.tokens:
        yield read


async def _while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What work returns, which ends when the caller leaves; then a ClientDisconnect."""
    working, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, left}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, left):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _left(receive: Receive) -> None:
    """Waits until the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(kind: str, data: Mapping[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))
