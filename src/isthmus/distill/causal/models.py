"""The models of a language task: base, teacher and new student."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from isthmus.distill.causal import tokenizer
from isthmus.distill.causal.tokenizer import FILE, Vocabulary
from isthmus.distill.language.lora import Lora
from isthmus.distill.language.teachers import FUNCTION, function_of
from isthmus.distill.teachers.pretrained import pretrained
from isthmus.distill.types import Index
from isthmus.features.errors import ConfigurationError, IsthmusError, Problem, extra

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPE = {"width": 128, "layers": 4, "heads": 4, "inner": 384}
"""Default sizes of a new student."""


class Language(NamedTuple):
    model: "PreTrainedModel"
    vocabulary: Vocabulary


def language(source: str, where: str) -> Language:
    """Load the base or teacher of a language-model distillation: a causal model in float32, with its tokenizer.

    `source` is a model folder, or "module:function", a function that returns model and tokenizer. `where` names the
    declaration in error messages. Raises a ConfigurationError if the source cannot be loaded, if the tokenizer does not
    match, or if the model is not a causal model of transformers with the attention "sdpa". Raises a DependencyError if
    transformers is not installed. Errors of the user's function are raised unchanged.
    """
    if FUNCTION.fullmatch(source):
        answer = call_function(source, where)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            problem = Problem(source, f"returns a {type(answer).__name__}", "a model and its tokenizer")
            raise ConfigurationError(where, [problem])
        model, file = answer
    else:
        if not (Path(source) / FILE).is_file():
            problem = Problem(source, f"is not a folder with {FILE}", 'a folder of a model, or "module:function"')
            raise ConfigurationError(where, [problem])
        with extra("text"):
            from tokenizers import Tokenizer
        model, file = pretrained(source).module, Tokenizer.from_file(str(Path(source) / FILE))
    return Language(_causal(model, source, where), tokenizer.full_vocabulary(file, model.config, where))


def student(source: str | None, vocabulary: Vocabulary, context: int, shape: Mapping[str, Any], where: str) -> Any:
    """Create the student of a language-model distillation: an untrained causal model for a vocabulary.

    If `source` is "module:function", call this function of the user with the vocabulary size. If it is None, build a
    Llama with random weights from torch's global generator. `context` is its maximum number of tokens, and `shape` maps
    "width", "layers", "heads" and "inner" to its sizes. `where` names the declaration in error messages.

    Raises a ConfigurationError if the function cannot be imported, or if it returns a model that is not causal, has
    another vocabulary size, or has another attention than "sdpa". Also raises one if width / heads in `shape` is not an
    even whole number.
    """
    if source is not None:
        model = _causal(call_function(source, where, vocabulary.size), source, where)
        if model.config.vocab_size != vocabulary.size:
            found = f"returns a model of {model.config.vocab_size:,} tokens"
            raise ConfigurationError(
                where, [Problem(source, found, f"a model of {vocabulary.size:,} tokens, the size passed to it")]
            )
        return model
    with extra("text"):
        from transformers import LlamaConfig, LlamaForCausalLM
    width, layers, heads, inner = (shape[name] for name in SHAPE)
    if width % heads or (width // heads) % 2:
        problem = Problem("shape", f"width {width} and heads {heads}", "an even number of units for each head")
        raise ConfigurationError(where, [problem])
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary.size, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=inner, max_position_embeddings=context, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=vocabulary.end, pad_token_id=None,
    ))  # fmt: skip


def import_function(source: str, where: str) -> Any:
    """Import a function of the user, "module:function"; raise a ConfigurationError if that fails."""
    try:
        return function_of(source)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(where, [Problem(source, f"cannot be imported ({error})")]) from error


def call_function(source: str, where: str, *arguments: Any) -> Any:
    """Call a function of the user; raise a ConfigurationError if it cannot be imported or raises an error."""
    function = import_function(source, where)
    try:
        return function(*arguments)
    except IsthmusError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise ConfigurationError(where, [Problem(source, f"raises {type(error).__name__}: {error}")]) from error


def prune_embeddings(model: Any, vocabulary: Vocabulary) -> Any:
    """Copy a base model as a trainable student, with embeddings only for the tokens that `vocabulary` keeps.

    The base itself stays unchanged. The copy keeps all embeddings if the vocabulary is not pruned.
    """
    model = copy.deepcopy(model).requires_grad_(requires_grad=True)
    if vocabulary.kept is None:
        return model
    kept: Index = vocabulary.kept
    layers = {id(layer.weight): layer for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    with torch.no_grad():
        for layer in layers.values():
            for weights in (layer.weight, getattr(layer, "bias", None)):
                if weights is not None:
                    weights[: len(kept)] = weights[torch.from_numpy(kept)].clone()
    model.resize_token_embeddings(len(kept))
    model.config.eos_token_id = vocabulary.end
    model.config.bos_token_id = model.config.pad_token_id = None
    return model


def add_lora(model: Any, lora: Lora, where: str) -> Any:
    """Freeze a model and add trainable LoRA layers to it, in place; return the same model.

    `lora.layers` has the names of the linear layers to adapt; empty means all. `where` names the declaration in error
    messages. Raises a ConfigurationError if the model has no layer with such a name.
    """
    with extra("lora"):
        from peft import LoraConfig, inject_adapter_in_model
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout,
        target_modules=[*lora.layers] or "all-linear",
    )  # fmt: skip
    try:
        return inject_adapter_in_model(config, model)
    except ValueError as error:  # no layer has this name
        names = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
        problem = Problem("lora: layers", ", ".join(lora.layers), f"some of {', '.join(sorted(names))}")
        raise ConfigurationError(where, [problem]) from error


def merge_lora(model: Any) -> Any:
    from peft.tuners.lora import LoraLayer

    for name, layer in [*model.named_modules()]:
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
            model.set_submodule(name, layer.get_base_layer())
    return model.requires_grad_(requires_grad=True)


def _causal(model: Any, source: str, where: str) -> Any:
    with extra("text"):
        from transformers import GenerationMixin, PreTrainedModel
    if not (isinstance(model, PreTrainedModel) and isinstance(model, GenerationMixin)):
        found = f"returns a {type(model).__name__}"
        raise ConfigurationError(where, [Problem(source, found, "a causal language model of transformers")])
    if (attention := model.config._attn_implementation) != "sdpa":
        # Other attentions add the boolean mask to the scores, which would hide nothing.
        problem = Problem(source, f"has the attention {attention!r}, which cannot separate packed texts", "'sdpa'")
        raise ConfigurationError(where, [problem], remedy='load it with attn_implementation="sdpa"')
    return model.float()
