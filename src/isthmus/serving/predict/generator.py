"""Generate text with a deployed model, one token at a time."""

from collections.abc import AsyncIterator, Sequence

from isthmus.package.generation.decoder import StepOutput
from isthmus.package.generation.prompt import LOGITS, NEW
from isthmus.package.prompts import generation_of
from isthmus.serving.limits import Limits
from isthmus.serving.predict.tensors import TensorInputs, TensorPredictor
from isthmus.serving.wire.errors import TooLargeError


class Generator:
    """A text generator for a deployed model. Concurrent texts take turns, token by token, with separate caches."""

    def __init__(self, predictor: TensorPredictor) -> None:
        assert predictor.model.text is not None  # noqa: S101 - the caller has checked
        self.predictor = predictor
        self.tokenizer, self.decoder = predictor.model.text
        self.generation = generation_of(predictor.model.manifest)

    def room(self, prompt: Sequence[int], wanted: int | None, limits: Limits) -> int:
        """Return how many tokens to generate after a prompt: `wanted`, or fewer if the model's context has less room.

        `prompt` has the token ids of the prompt, and `wanted` is the number in the request. If it is None, the result
        is as large as the model, `limits` and the context allow. Raises TooLargeError if `wanted` exceeds what the
        model or `limits` allow, and RequestError if the prompt is empty or too long.
        """
        most = min(self.generation.most, limits.generated_tokens)
        if wanted is not None and wanted > most:
            raise TooLargeError("max_tokens", f"is {wanted:,}", expected=f"1 to {most:,}")
        return min(self.decoder.require_prompt(prompt), most if wanted is None else wanted)

    async def tokens(self, prompt: Sequence[int], room: int) -> AsyncIterator[StepOutput]:
        cache, fed = self.decoder.cache(len(prompt) + room), prompt
        for _ in range(room):
            for part in self.decoder.parts(fed):
                inputs = TensorInputs(self.decoder.feeds(part, cache), (LOGITS, NEW), again=True)
                said = self.decoder.take(await self.predictor.batches.predict(inputs, 1), cache)
            yield said
            if said.token in self.generation.end:
                return
            fed = [said.token]
