"""Recompute recorded answers of tensor models: tensor requests one at a time, texts token by token."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import pyarrow as pa

from isthmus.features.contract.diff import require_service
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import IsthmusError
from isthmus.features.online.plan import LookupPlan
from isthmus.features.request.graph import RowGraph
from isthmus.orchestration.recording.mismatches import Cause, Causes, Recorded
from isthmus.orchestration.recording.provenance import view_answers
from isthmus.orchestration.recording.requests import LIMITS, Requests, prompt_of, read_tensors
from isthmus.orchestration.recording.storedrows import StoredRows
from isthmus.package.generation.decoder import Array
from isthmus.package.generation.prompt import LOGITS, NEW
from isthmus.package.prompts import generation_of
from isthmus.serving.lookup.prompt import Prompt
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.predict.tensors import TensorPredictor
from isthmus.serving.recorder.digest import tensors_digest, text_digest


def differing(
    answers: pa.Table, predictor: TensorPredictor, causes: Causes, *, another: bool
) -> Iterator[tuple[int, Cause, str]]:
    """Yield the index, cause and explanation of each answer that differs from its record.

    `another` says that the predictor runs a different package than the one that answered.
    """
    columns = [answers[name].to_pylist() for name in ("request", "digest", "package", "runtime")]
    for place, (text, (then,), package, runtime) in enumerate(zip(*columns, strict=True)):
        try:
            _, inputs, _ = predictor.read(read_tensors(text.encode()), LIMITS)
            now = tensors_digest(predictor.model.run(inputs.feeds, inputs.outputs))
        except (IsthmusError, msgspec.MsgspecError) as error:
            yield place, Cause.PACKAGE, f"package {predictor.model.deployment.digest[:12]} cannot answer: {error}"
            continue
        if now == then % (1 << 64):
            continue
        if another:
            digest = predictor.model.deployment.digest
            yield place, Cause.PACKAGE, f"package {digest[:12]} returns other tensors than {package[:12]} did"
        else:
            yield place, Cause.ENGINE, f"the model returns other tensors: {causes.runtimes(runtime)}"


class TextWriter:
    """Generates texts with a model under a contract.

    `another` says that its package differs from the one that answered.

    Raises:
        PackageError: the model does not generate text.
        ContractMismatch: the features of its service changed since its package was exported.
    """

    def __init__(
        self, contract: Contract, model: DeployedModel, graphs: Callable[[str], RowGraph], *, another: bool
    ) -> None:
        service = model.deployment.service
        require_service(f"model {model.deployment.model}", model.contract, contract, service)
        self.model, self.another = model, another
        self.generation = generation_of(model.manifest)
        self.prompt = Prompt(self.generation, contract, service, graphs=graphs)

    @property
    def plan(self) -> LookupPlan:
        return self.prompt.plan

    def differing(
        self, bodies: Sequence[bytes | LookupError], requests: Requests, stored: Mapping[str, StoredRows],
        recorded: Recorded, causes: Causes, places: Sequence[int],
    ) -> Iterator[tuple[int, Cause, str] | None]:  # fmt: skip
        """Generate each text in `places` again, and compare it with the recorded one.

        Yields its index, cause and explanation if it differs or cannot be generated, else None.
        """
        digest = self.model.deployment.digest
        cause = Cause.PACKAGE if self.another else Cause.ENGINE
        for place in places:
            row = np.array([recorded.starts[place]])
            fields = {name: values.take(row) for name, values in requests.fields.items()}
            rows = view_answers({name: own.take(row) for name, own in stored.items()})
            before, count = recorded.outputs.reshape(-1, 2)[row[0]].astype(int).tolist()
            try:
                features = self.prompt.features(fields, rows)
                tokens, generated = self._text(prompt_of(bodies[place]), features, count)
            except IsthmusError as error:
                yield place, cause, f"package {digest[:12]} cannot write the text: {error}"
                continue
            if text_digest(tokens, generated) == int(recorded.digest[row[0]]) % (1 << 64):
                yield None
            elif self.another:
                yield place, cause, f"package {digest[:12]} writes a different text than {recorded.package[:12]} did"
            else:
                what = (
                    f"its prompt has {len(tokens):,} tokens, and had {before:,}" if len(tokens) != before
                    else f"the {count:,} tokens of its text differ"
                )  # fmt: skip
                yield place, cause, f"{what}: {causes.runtime(recorded, place)}"

    def _text(self, prompt: str, features: Mapping[str, str], count: int) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt, and the `count` tokens generated after it."""
        assert self.model.text is not None  # noqa: S101 - its manifest says how it generates text
        tokenizer, decoder = self.model.text
        tokens = tokenizer.encode(self.generation.parts(prompt, features))
        return tokens, [read.token for read in decoder.greedy(self._run, tokens, count)]

    def _run(self, feeds: dict[str, Array]) -> Mapping[str, Array]:
        return self.model.run(feeds, (LOGITS, NEW))
