"""`POST /generate`: a text as server-sent events."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch

from isthmus.distill.export.causal import export
from isthmus.distill.language.decoding import DecodingSettings
from isthmus.distill.onnx.runtime import ask, session
from isthmus.features.profiles import ServingProfile
from isthmus.package.generation.prompt import Generation
from isthmus.package.generation.tokenizer import GrowingText, Tokenizer
from isthmus.package.manifest import open_package
from isthmus.package.prompts import decoder_of, generation_of, open_tokenizer
from isthmus.serving.http.generate import tokens_of
from isthmus.serving.limits import Limits
from isthmus.serving.recorder.batch import ANSWER, batches
from isthmus.serving.recorder.digest import text_digest
from isthmus.serving.recorder.options import Recording
from isthmus.serving.recorder.spool import segments
from isthmus.serving.rollout.releases import deploy
from tests.distill.decoder.support import origin, tiny
from tests.serving.support import CONTRACT, NOW, TABLES, Server, serving, verdict_of, wait
from tests.tokenizing import trained

LIMITS = Limits(generations=3, generated_tokens=1500, deadline_seconds=2.0)
UA = {"carrier": ["UA"]}
STRANGE = "Ω"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that never ends a text, and has no numbers for a letter that is in no golden prompt."""
    model: Any = tiny(tie_word_embeddings=False, max_position_embeddings=16384, num_hidden_layers=4)
    (token,) = generation_tokens(STRANGE.encode()[:1])
    with torch.no_grad():
        model.lm_head.weight[[0, token]] = 0
        model.model.embed_tokens.weight[token] = torch.nan
    settings = DecodingSettings(
        prompts=("Return the sum.", "naïve"), features={"punctuality__flights": "3", "punctuality__late_rate": "0.5"},
        template="<|be-gin|>{punctuality__flights} flights, late {punctuality__late_rate}\n{prompt}<|end|>",
        most=1800, golden_tokens=8, precisions=("fp32",), formats=("ort",),
    )  # fmt: skip
    return export(model, trained(), tmp_path_factory.mktemp("packages"), origin=origin(), settings=settings).path


def generation_tokens(letter: bytes) -> list[int]:
    """The token of a byte."""
    from isthmus.package.generation.tokenizer import ALPHABET

    vocabulary = json.loads(trained())["model"]["vocab"]
    return [vocabulary[shown] for shown, byte in ALPHABET.items() if bytes([byte]) == letter]


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory, redis_url: str, package: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("writer")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, redis_url, limits=LIMITS) as running:
        profile = ServingProfile(precision="fp32", probation_seconds=0)
        deploy(package, verdict_of(package), CONTRACT, profile, running.deployment, tables=TABLES, at=NOW)
        wait(lambda: running.http.get("/readyz").json().get("model") == "writer", "the model")
        yield running


def events(body: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def generated(server: Server, **asked: Any) -> tuple[str, dict[str, Any]]:
    """The text of an answer, and its end."""
    answer = server.http.post("/generate", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["isthmus-contract"] == CONTRACT.hash
    *texts, (kind, end) = events(answer.text)
    assert kind == "end"
    assert {name for name, _ in texts} <= {"text"}
    return "".join(data["text"] for _, data in texts), end


def alone(package: Path, prompt: str, flights: str, rate: str, most: int) -> tuple[str, int]:
    """The same without a server, and the number of tokens of the prompt."""
    tokens, said = tokens_alone(package, prompt, flights, rate, most)
    text = GrowingText(open_tokenizer(open_package(package)))
    return "".join(map(text.add, said)) + text.end(), len(tokens)


def tokens_alone(package: Path, prompt: str, flights: str, rate: str, most: int) -> tuple[list[int], list[int]]:
    opened = open_package(package)
    variant = opened.manifest.variant("fp32")
    tokenizer, model = open_tokenizer(opened), session(opened.files.read(variant.file), 1)
    features = {"punctuality__flights": flights, "punctuality__late_rate": rate}
    tokens = tokenizer.encode(generation_of(opened.manifest).parts(prompt, features))
    said = decoder_of(opened.manifest, variant).greedy(lambda feeds: ask(model, feeds), tokens, most)
    return tokens, [read.token for read in said]


def test_a_text_comes_from_the_prompt_and_the_features_of_an_entity(writer: Server, package: Path) -> None:
    text, end = generated(writer, prompt="Return 漢字 <|end|>", entities=UA, max_tokens=24)
    expected, count = alone(package, "Return 漢字 <|end|>", str(2**60 + 1), "0.1", 24)
    assert text == expected
    assert end == {"reason": "length", "prompt_tokens": count, "tokens": 24}
    # Of a key that is not there, and of a row whose values are null, the template says so.
    for carrier in ("AA", "nobody"):
        asked = {"prompt": "Return", "entities": {"carrier": [carrier]}, "max_tokens": 8}
        assert generated(writer, **asked)[0] == alone(package, "Return", "unknown", "unknown", 8)[0]


def test_texts_at_the_same_time_are_those_of_each_alone(writer: Server) -> None:
    prompts = ["Return", "Open a file", "naïve"]
    asked = [{"prompt": prompt, "entities": UA, "max_tokens": 120} for prompt in prompts]
    expected = [generated(writer, **each)[0] for each in asked]
    assert len({*expected}) == 3
    with ThreadPoolExecutor(3) as pool:
        assert [text for text, _ in pool.map(lambda each: generated(writer, **each), asked)] == expected


def test_more_texts_than_the_limit_are_refused_and_a_caller_who_leaves_makes_room(writer: Server) -> None:
    long = {"prompt": "Return", "entities": UA, "max_tokens": 1500}
    # The client of `writer` reads each answer to its end; an iterator that is let go ends it.
    lines: list[Iterator[str]] = []
    with httpx.Client(base_url=writer.http.base_url) as http, ExitStack() as streams:
        for _ in range(3):
            answer = streams.enter_context(http.stream("POST", "/generate", json=long))
            lines.append(answer.iter_lines())
            assert next(lines[-1]) == "event: text"
        refused = writer.http.post("/generate", json=long)
        assert refused.status_code == 503, refused.text[-300:]
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["found"] == "3 texts are being generated"
        # Lookups have room meanwhile.
        assert writer.lookup(features=["punctuality:flights"], entities=UA).status_code == 200
    wait(lambda: _left(writer) == 3, "the server to see that they left")
    text, end = generated(writer, prompt="Return", entities=UA, max_tokens=5)
    assert text
    assert end["tokens"] == 5
    # They left in mid-sentence: nobody generated to the end.
    whole = generated(writer, **long)[1]
    assert whole["tokens"] == 1500


def test_a_caller_who_leaves_before_the_first_token_ends_the_run(writer: Server) -> None:
    """To read so long a prompt takes longer than `deadline_seconds`, or nearly so."""
    before = _left(writer)
    long = {"prompt": "a b " * 7000, "entities": UA, "max_tokens": 5}
    with httpx.Client(base_url=writer.http.base_url, timeout=0.3) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/generate", json=long)
    wait(lambda: _left(writer) == before + 1, "the server to see that they left")
    assert generated(writer, prompt="Return", entities=UA, max_tokens=5)[1]["tokens"] == 5


def _wide(package: Path) -> tuple[Generation, Tokenizer, list[str | int]]:
    """A package's generation with room for any prompt, its tokenizer, and a prompt with a long feature."""
    opened = open_package(package)
    generation = msgspec.structs.replace(generation_of(opened.manifest), context=1 << 20)
    features = {"punctuality__flights": "Return the sum. " * 16_000, "punctuality__late_rate": "0.5"}
    return generation, open_tokenizer(opened), generation.parts("a", features)


def test_a_long_feature_does_not_stop_the_event_loop(package: Path) -> None:
    generation, tokenizer, parts = _wide(package)

    async def longest() -> tuple[float, float]:
        """The time that it takes, and the longest in which the loop did nothing else."""
        loop, pause = asyncio.get_running_loop(), 0.0
        began = last = loop.time()
        reading = asyncio.ensure_future(tokens_of(generation, tokenizer, parts, asyncio.Lock()))
        while not reading.done():
            await asyncio.sleep(0.001)
            pause, last = max(pause, loop.time() - last), loop.time()
        assert len(await reading) > 50_000
        return loop.time() - began, pause

    whole, pause = asyncio.run(longest())
    assert pause < whole / 2


def test_prompts_whose_callers_have_left_take_one_thread_and_never_start_after_it(package: Path) -> None:
    generation, tokenizer, parts = _wide(package)
    started = []

    class Counted(Tokenizer):
        def encode(self, parts: Sequence[str | int], most: int | None = None) -> list[int]:
            started.append(threading.current_thread())
            return tokenizer.encode(parts, most)

    async def leave() -> list[int]:
        counted, turn = Counted.__new__(Counted), asyncio.Lock()
        asked = [asyncio.ensure_future(tokens_of(generation, counted, parts, turn)) for _ in range(12)]
        while not started:
            await asyncio.sleep(0)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return await tokens_of(generation, counted, parts, turn)

    assert asyncio.run(leave()) == tokenizer.encode(parts)
    assert len(started) == 2


@pytest.mark.parametrize("word", ["a", "-", "ab", "é"])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(writer: Server, word: str) -> None:
    asked = {"prompt": word * (900_000 // len(word.encode())), "entities": UA, "max_tokens": 1}
    answer = writer.http.post("/generate", json=asked)
    assert answer.status_code == 422, answer.text
    assert "tokens or more, and the context of the model 16,384" in answer.json()["found"]


def _left(server: Server) -> int:
    lines = [line for line in server.lines() if line.get("path") == "/generate"]
    return sum(line.get("found") == "the client disconnected before its request was complete" for line in lines)


def test_the_deadline_is_that_of_the_first_token(writer: Server) -> None:
    """1,500 tokens take longer than `deadline_seconds`, where a machine is slow, and come whole."""
    _, end = generated(writer, prompt="Open", entities=UA, max_tokens=1500)
    assert end["reason"] == "length"


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({"prompt": "a b " * 9000, "entities": UA}, 422, "and the context of the model 16,384"),
        ({"prompt": "a", "entities": UA, "max_tokens": 1501}, 413, "is 1,501"),
        ({"prompt": "a", "entities": UA, "max_tokens": 0}, 422, "Expected `int` >= 1"),
        ({"prompt": "a"}, 422, "is missing"),
        ({"prompt": "a", "entities": {"carrier": ["UA", "AA"]}}, 413, "2 rows"),
        ({"prompt": "a", "entities": {"carrier": []}}, 422, "has no rows"),
        ({"prompt": "a", "entities": {"pilot": ["UA"]}}, 422, "is not a join key"),
        ({"prompt": "a", "entities": UA, "model": "late"}, 404, "no model 'late'"),
        ({"entities": UA}, 422, "missing required field `prompt`"),
        ({"prompt": f"a {STRANGE}", "entities": UA}, 500, "logits that are NaN or infinite after 0 tokens"),
    ],
)
def test_what_cannot_be_generated_is_refused(writer: Server, asked: dict[str, Any], status: int, message: str) -> None:
    answer = writer.http.post("/generate", json=asked)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["found"]


def test_a_model_of_rows_generates_nothing(server: Server) -> None:
    answer = server.http.post("/generate", json={"prompt": "a"})
    assert answer.status_code == 422
    assert answer.json()["found"] == "does not generate text"


def test_a_key_needs_the_scope_of_the_model_and_a_text_ends_in_time(
    tmp_path: Path, redis_url: str, package: Path
) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, limits=replace(LIMITS, generation_seconds=0.02, deadline_seconds=1.0)) as running:
        profile = ServingProfile(precision="fp32", probation_seconds=0)
        deploy(package, verdict_of(package), CONTRACT, profile, running.deployment, tables=TABLES, at=NOW)
        wait(lambda: running.http.get("/readyz").json().get("model") == "writer", "the model")
        keys = running.grant(writer="predict:writer", reader="read:*")
        asked = {"prompt": "a", "entities": UA, "max_tokens": 2}

        def status(name: str) -> int:
            answer: httpx.Response = running.http.post("/generate", json=asked, headers={"authorization": keys[name]})
            return answer.status_code

        assert (status("writer"), status("reader")) == (200, 403)
        long = {"prompt": "Return", "entities": UA, "max_tokens": 1500}
        answer = running.http.post("/generate", json=long, headers={"authorization": keys["writer"]})
        kind, end = events(answer.text)[-1]
        assert (kind, end["reason"]) == ("end", "time")
        assert end["tokens"] < 1500
        # A prompt that takes longer to read than any request may: not its body was late.
        long = {"prompt": "a b " * 8000, "entities": UA, "max_tokens": 2}
        answer = running.http.post("/generate", json=long, headers={"authorization": keys["writer"]})
        if answer.status_code != 200:  # on a quick machine
            assert (answer.status_code, answer.json()["found"]) == (503, "could not answer within 1 seconds")


def test_a_text_is_recorded_with_what_it_rested_on_and_what_was_said_of_it(
    tmp_path: Path, redis_url: str, package: Path
) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    spool, bodies = tmp_path / "spool", [
        {"prompt": "Return", "entities": UA, "max_tokens": 9}, {"prompt": "Open", "entities": UA, "max_tokens": 1500}
    ]  # fmt: skip
    with serving(
        tmp_path, redis_url, limits=LIMITS, record=Recording(predictions=False), spool=str(spool), spool_key="aa" * 16
    ) as running:
        profile = ServingProfile(precision="fp32", probation_seconds=0)
        deploy(package, verdict_of(package), CONTRACT, profile, running.deployment, tables=TABLES, at=NOW)
        wait(lambda: running.http.get("/readyz").json().get("model") == "writer", "the model")
        whole = running.http.post("/generate", json=bodies[0])
        # The client of `running` reads each answer to its end.
        with ExitStack() as left:
            http = left.enter_context(httpx.Client(base_url=running.http.base_url))
            cut = left.enter_context(http.stream("POST", "/generate", json=bodies[1]))
            assert next(cut.iter_lines()) == "event: text"
        wait(lambda: _left(running) == 1, "the server to see that they left")
        refused = running.http.post("/generate", json={"prompt": f"a {STRANGE}", "entities": UA})
        assert (refused.status_code, "isthmus-answer" in refused.headers) == (500, False)
    groups = [group for path in segments(spool) for batch in batches(path.read_bytes()) for group in batch.groups]
    assert {(group.route, group.contract, group.variant) for group in groups} == {("generate", CONTRACT.hash, "fp32/1")}
    answers = np.concatenate([np.frombuffer(group.answers, ANSWER) for group in groups])
    numbers = [int(answer.headers["isthmus-answer"].partition("-")[2], 16) for answer in (whole, cut)]
    assert answers["sequence"].tolist() == numbers
    assert answers["at"].tolist() == [NOW, NOW]
    assert b"".join(group.requests for group in groups) == whole.request.content + cut.request.content
    views = [view for group in groups for view in group.views]
    assert {view.view for view in views} == {"punctuality"}
    assert sum(len(view.content) for view in views) == 16
    outputs = np.concatenate([np.frombuffer(group.outputs, "<f4") for group in groups]).astype(int)
    digest = np.concatenate([np.frombuffer(group.digest, np.uint64) for group in groups]).tolist()
    # Also of the text whose reader left: what was said until then.
    for asked, (prompt, count), known in zip(bodies, outputs.reshape(2, 2).tolist(), digest, strict=True):
        tokens, said = tokens_alone(package, str(asked["prompt"]), str(2**60 + 1), "0.1", count)
        assert (len(tokens), len(said), text_digest(tokens, said)) == (prompt, count, known)
    assert outputs[1] == 9
    assert 0 < outputs[3] < 1500
