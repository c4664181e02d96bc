"""A causal language model with its tokenizer: everything its package is made from."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.decoder.reference import DecoderReference
from isthmus.distill.decoder.tokenizer import new_generation
from isthmus.distill.language.decoding import DecodingSettings
from isthmus.features.errors import ConfigurationError, Problem
from isthmus.package.generation.prompt import Generation
from isthmus.package.generation.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@dataclass(frozen=True, eq=False)
class TextWriter:
    """A model, the content of its `tokenizer.json` and settings, checked to fit: everything a package is made from."""

    model: "LlamaForCausalLM"
    file: bytes
    network: CachedModel
    generation: Generation
    tokenizer: Tokenizer
    settings: DecodingSettings

    @classmethod
    def of(cls, model: "LlamaForCausalLM", file: bytes, settings: DecodingSettings) -> "TextWriter":
        """Check that a language model, its tokenizer and the settings for text generation fit together, for export.

        `file` is the content of the `tokenizer.json`. Switches the model to eval mode, in place. Raises a
        ConfigurationError if the settings are wrong or have no prompts, or if model and tokenizer do not fit. Raises a
        RequestError if a prompt in `settings.prompts` cannot be encoded.
        """
        problems = settings.problems("decoding")
        if not problems and not settings.prompts:
            problems.append(Problem("decoding: prompts", "empty", "at least one prompt, as users write them"))
        if problems:
            raise ConfigurationError("decoding", problems)
        network = CachedModel(model.eval(), settings.context)
        generation, opened = new_generation(
            file, context=network.context, most=settings.tokens(network.context), end=settings.end or _ends(model),
            template=settings.template,
        )  # fmt: skip
        _require_own(model, generation, opened)
        features = dict.fromkeys(generation.features, generation.missing) | {**settings.features}
        for text in settings.prompts:
            count = len(opened.encode(generation.parts(text, features)))
            if not 0 < count < network.context:
                found, limit = f"{text!r:.60} has {count:,} tokens", network.context - 1
                problems.append(Problem("decoding: prompts", found, f"1 to {limit:,}"))
        if problems:
            raise ConfigurationError("decoding", problems)
        return cls(model, file, network, generation, opened, replace(settings, features=features))

    @cached_property
    def reference(self) -> DecoderReference:
        return DecoderReference.of(self.model, self.network, self.generation, self.tokenizer, self.settings)


def _ends(model: "LlamaForCausalLM") -> tuple[int, ...]:
    end: Any = model.config.eos_token_id
    return () if end is None else (end,) if isinstance(end, int) else tuple(end)


def _require_own(model: "LlamaForCausalLM", generation: Generation, tokenizer: Tokenizer) -> None:
    config: Any = model.config
    problems = []
    if tokenizer.size > config.vocab_size:
        problems.append(
            Problem("tokenizer", f"has {tokenizer.size:,} tokens", f"at most the model's {config.vocab_size:,}")
        )
    control = {each.token for each in generation.control}
    problems += [
        Problem("tokenizer", f"has no control token {token}, which begins or ends the model's texts",
                "the tokenizer that the model was trained with")
        for token in dict.fromkeys((*generation.end, *generation.begin))
        if token not in control
    ]  # fmt: skip
    if problems:
        raise ConfigurationError("decoding", problems)
