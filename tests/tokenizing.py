"""Tokenizers that are trained in a moment."""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.texts import docstrings

END, BEGIN = "<|end|>", "<|be-gin|>"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""That of Llama 3."""


@cache
def trained(kind: str = "gpt2", size: int = 600) -> bytes:
    """The file of a tokenizer like GPT-2's, SmolLM's or Llama 3's. Token 0 ends a text, token 1 begins one."""
    own = Tokenizer(models.BPE())
    level: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "llama3")
    if kind == "smollm":
        level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    if kind == "llama3":
        own.normalizer = normalizers.NFC()
        level = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), level])
    own.pre_tokenizer, own.decoder = level, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END, BEGIN], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    own.train_from_iterator(docstrings()[:1500], trainer)
    if kind == "llama3":
        template = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
        own.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        own.add_tokens([AddedToken("  \n", normalized=False), AddedToken("fi\u0301x")])
    file = json.loads(own.to_str())
    if kind == "gpt2":
        # Files of old say nothing of it, and mean yes.
        del file["pre_tokenizer"]["use_regex"]
    return json.dumps(file, ensure_ascii=False).encode()
