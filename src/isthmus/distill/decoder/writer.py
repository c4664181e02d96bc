"""A causal language model that continues texts token by token, with its tokenizer: what a package of it is made of."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.decoder.reference import Reference
from isthmus.distill.decoder.tokenizer import new_generation
from isthmus.distill.language.decoding import DecodingSettings
from isthmus.features.errors import ConfigurationError, Problem
from isthmus.package.generation.prompt import Generation
from isthmus.package.generation.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@dataclass(frozen=True, eq=False)
class Writer:
    """A model and its tokenizer, which are of each other, as far as that shows.

    Attributes:
        file: `tokenizer.json`.
        network: the model with a cache.
        generation: what its package says of generating text.
        tokenizer: the file, opened.
        settings: with golden prompts, and a text for each feature of the template.
    """

    model: "LlamaForCausalLM"
    file: bytes
    network: CachedModel
    generation: Generation
    tokenizer: Tokenizer
    settings: DecodingSettings

    @classmethod
    def of(cls, model: "LlamaForCausalLM", file: bytes, settings: DecodingSettings) -> "Writer":
        """That of a model.

        Raises:
            ConfigurationError: model or tokenizer cannot be converted, or are not of each other, or a setting is wrong.
            RequestError: a golden prompt has letters that no token has.
        """
        problems = settings.problems("decoding")
        if not problems and not settings.prompts:
            problems.append(Problem("decoding: prompts", "there is none", "some texts, as users write them"))
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
                found, most = f"{text!r:.60} has {count:,} tokens", network.context - 1
                problems.append(Problem("decoding: prompts", found, f"1 to {most:,}"))
        if problems:
            raise ConfigurationError("decoding", problems)
        return cls(model, file, network, generation, opened, replace(settings, features=features))

    @cached_property
    def reference(self) -> Reference:
        """What its files are compared with; a GateFailed if the module with a cache is not what the model is."""
        return Reference.of(self.model, self.network, self.generation, self.tokenizer, self.settings)


def _ends(model: "LlamaForCausalLM") -> tuple[int, ...]:
    end: Any = model.config.eos_token_id
    return () if end is None else (end,) if isinstance(end, int) else tuple(end)


def _require_own(model: "LlamaForCausalLM", generation: Generation, tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that is not the model's, as far as that shows."""
    config: Any = model.config
    problems = []
    if tokenizer.size > config.vocab_size:
        problems.append(
            Problem("tokenizer", f"has {tokenizer.size:,} tokens", f"at most the model's {config.vocab_size:,}")
        )
    control = {each.token for each in generation.control}
    problems += [
        Problem("tokenizer", f"has no control token {token}, with which the model ends or begins texts",
                "the tokenizer that the model was trained with")
        for token in dict.fromkeys((*generation.end, *generation.begin))
        if token not in control
    ]  # fmt: skip
    if problems:
        raise ConfigurationError("decoding", problems)
