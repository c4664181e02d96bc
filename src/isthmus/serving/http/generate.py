"""`/generate`: text as it comes, as server-sent events (https://html.spec.whatwg.org, section 9.2)."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from isthmus.features.decoding.decoder import Read
from isthmus.features.decoding.generation import Generation, shown
from isthmus.features.decoding.tokenizer import Text, Tokenizer
from isthmus.features.errors import IsthmusError, RequestError
from isthmus.serving.http.guard import granted
from isthmus.serving.http.predict import Predictions
from isthmus.serving.limits import Limits
from isthmus.serving.lookup import compact
from isthmus.serving.lookup.request import LookupInputs
from isthmus.serving.predict.generator import Generator
from isthmus.serving.state import State
from isthmus.serving.threads import BYTES, offload
from isthmus.serving.waits import DEADLINE, REFUSAL
from isthmus.serving.wire import decode
from isthmus.serving.wire.errors import BusyError, DefectError, TooLargeError
from isthmus.serving.wire.exchange import body_of, message_of
from isthmus.serving.wire.messages import EventEnd, EventText, GenerateRequest

_REQUEST = msgspec.json.Decoder(GenerateRequest)
EVENTS = "text/event-stream"
T = TypeVar("T")


class Generations:
    """The texts that a server process generates."""

    def __init__(self, state: Callable[[], State], predictions: Predictions, limits: Limits) -> None:
        self._state, self._predictions, self._limits = state, predictions, limits
        self._under_way = 0

    async def answer(self, request: Request) -> Response:
        """The text behind a prompt.

        The first token has the time of any request. What is wrong before it is answered with a status; what goes wrong
        behind it, with an event.
        """
        wanted, state = message_of(await body_of(request), _REQUEST), self._state()
        granted(request).require("predict", state.deployed(wanted.model).deployment.model)
        generator = state.generator(wanted.model)
        if self._under_way >= self._limits.generations:
            raise BusyError("server", f"{self._under_way:,} texts are being generated",
                            remedy="try again, or raise server.limits.generations or server.workers")  # fmt: skip
        self._under_way += 1
        try:
            asked = await _while_there(request.receive, self._begun(state, generator, wanted))
        except BaseException:
            self._under_way -= 1
            raise
        return _Stream(generator, asked, self._limits, self._end)

    async def _begun(self, state: State, generator: Generator, wanted: GenerateRequest) -> "_Asked":
        """A text with its first token."""
        features = await self._features(state, wanted)
        prompt = await tokens_of(generator.generation, generator.tokenizer, wanted.prompt, features)
        room = generator.room(prompt, wanted.max_tokens, self._limits)
        tokens = generator.tokens(prompt, room)
        return _Asked(len(prompt), room, tokens, await anext(tokens))

    def _end(self) -> None:
        self._under_way -= 1

    async def _features(self, state: State, wanted: GenerateRequest) -> dict[str, str]:
        """The texts of the features that the template names, as a lookup answers with them."""
        lookup = state.prompted
        if lookup is None:
            if wanted.entities:
                raise RequestError(f"entities.{next(iter(wanted.entities))}", "is read by no feature of the prompt",
                                   expected="no entities")  # fmt: skip
            return {}
        join_keys = {column.name: column for view in lookup.contract.views.values() for column in view.keys}
        keys, fields = decode.entities(wanted.entities, join_keys, lookup.request, lookup.optional)
        inputs = LookupInputs.of(lookup, keys, fields, self._limits)
        if inputs.rows != 1:
            raise TooLargeError("entities", f"{inputs.rows:,} rows", expected="one row for a text")
        answers = await self._predictions.stored(lookup, inputs.keys, 1)
        computed = lookup.compute(inputs.request, answers) if lookup.computes else {}
        values = orjson.loads(compact.values(lookup, inputs.keys, answers, computed))["values"][len(inputs.keys) :]
        missing = state.generator(wanted.model).generation.missing
        return {
            name: missing if value is None else shown(value, dtype)
            for name, (value,), (_, _, dtype) in zip(lookup.names, values, lookup.features, strict=True)
        }


async def tokens_of(
    generation: Generation, tokenizer: Tokenizer, prompt: str, features: Mapping[str, str]
) -> list[int]:
    """The tokens of a prompt, which a thread reads if it is long."""
    parts = generation.parts(prompt, features)
    size = sum(len(part) for part in parts if isinstance(part, str))
    return await offload(size > BYTES, tokenizer.encode, parts)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt of so many tokens, the room behind it, its tokens, of which the first is there."""

    prompt: int
    room: int
    tokens: AsyncIterator[Read]
    first: Read


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
        text, count, asked = Text(self._generator.tokenizer), 0, self._asked
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.generation_seconds
        reason: Literal["end", "length", "time"] = "length"
        async with aclosing(_chained(asked)) as tokens:
            async for read in tokens:
                count += 1
                if read.token in self._generator.generation.end:
                    reason = "end"
                    break
                if piece := text.add(read.token):
                    yield _event("text", msgspec.to_builtins(EventText(piece)))
                if loop.time() > until and count < asked.room:
                    reason = "time"
                    break
        if piece := text.end():
            yield _event("text", msgspec.to_builtins(EventText(piece)))
        yield _event("end", msgspec.to_builtins(EventEnd(reason, asked.prompt, count)))


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
