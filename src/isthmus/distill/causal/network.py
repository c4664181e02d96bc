"""Causal language models on blocks of packed texts: student, teacher, and text generation for training."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isthmus.distill.losses.logits import IGNORED
from isthmus.distill.types import Index
from isthmus.features.errors import DataError


def attention_mask(positions: Tensor) -> Tensor:
    """Return the attention mask of blocks that hold several texts, so that texts do not attend to each other.

    `positions`, int64 (n, P), has the position of each token in its text, counted from 0, for n blocks of P tokens. The
    mask, bool (n, 1, P, P), is True where a token may attend: to itself and to earlier tokens of the same text.
    """
    texts = (positions == 0).cumsum(1)
    order = torch.arange(positions.shape[1], device=positions.device)
    return (texts[:, None, :, None] == texts[:, None, None, :]) & (order[None, :] <= order[:, None])


class Packed(nn.Module):
    """A causal language model for packed blocks: rows of P tokens that hold several texts.

    Maps tokens and their positions in the text, int64 (n, P), to logits (n, P, classes). For a pruned vocabulary,
    `kept` has the model's id of each kept token, and tokens and classes are ids of the pruned vocabulary.
    """

    kept: Tensor | None

    def __init__(self, model: Any, kept: Index | None = None) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("kept", None if kept is None else torch.from_numpy(kept), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits, _ = self.cached(tokens, positions, attention_mask(positions))
        return logits

    def cached(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Compute logits for tokens that continue the tokens in an attention cache; used to generate text.

        Args:
            tokens: next P tokens of n blocks, int64 (n, P).
            positions: position of each of these tokens in its text, int64 (n, P).
            mask: bool (n, 1, P, C + P), True where a token may attend to one of the C cached or the P new tokens.
            cache: cache of transformers, to which this call adds the new tokens in place; None to compute without a
                cache.

        Returns:
            The logits, (n, P, classes), and the cache, or None without a cache.
        """
        outputs = self.model(
            input_ids=tokens if self.kept is None else self.kept[tokens], position_ids=positions, attention_mask=mask,
            past_key_values=cache, use_cache=cache is not None,
        )  # fmt: skip
        logits: Tensor = outputs.logits
        return (logits if self.kept is None else logits[..., self.kept]), outputs.past_key_values


class CausalStudent(nn.Module):
    """A student for blocks of packed texts: tokens, positions in the text, and next tokens (targets), int64 (n, P).

    Returns `counts`, which is True where there is a target. In training mode, also returns `logits`, (n, P, classes).
    Eval mode saves memory: it returns `losses`, the cross entropy (0 without a target), and `best`, the likeliest next
    token.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.packed = Packed(model)

    @property
    def model(self) -> Any:
        return self.packed.model

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits, counts = self.packed(tokens, positions), targets != IGNORED
        if self.training:
            return {"logits": logits, "counts": counts}
        return {"losses": losses(logits, targets), "best": logits.argmax(-1), "counts": counts}


class CausalTeacher(nn.Module):
    """A teacher that reads the inputs of `CausalStudent` and returns `losses`, the cross entropy per token, (n, P).

    If `keys` names them, it adds `logits`, (n, P, classes), and `sequence`, int64 (n, P): the first `prompt` tokens of
    each block, followed by the teacher's greedy continuation. `end` is the token that ends a text.
    """

    def __init__(self, packed: Packed, keys: tuple[str, ...], prompt: int, end: int) -> None:
        super().__init__()
        self.packed, self.keys, self.prompt, self.end = packed, keys, prompt, end

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.packed(tokens, positions)
        outputs = {"losses": losses(logits, targets)}
        if "logits" in self.keys:
            outputs["logits"] = logits
        if "sequence" in self.keys:
            outputs["sequence"] = generate(self.packed, tokens, positions, self.prompt, self.end, greedy=True)
        return outputs


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")


def generate(packed: Packed, tokens: Tensor, positions: Tensor, prompt: int, end: int, *, greedy: bool) -> Tensor:
    """Let a language model replace the text after the first `prompt` tokens of each block by its own continuation.

    Used to train on generated text. The last text that begins within these tokens is continued to the end of the block.

    Args:
        packed: language model.
        tokens: n blocks of P tokens, int64 (n, P).
        positions: position of each token in its text, int64 (n, P).
        prompt: number of tokens to keep at the start of each block.
        end: token that ends a text; after the model writes it, only `end` follows.
        greedy: True to choose the likeliest token; False to draw each token with torch's global generator.

    Returns:
        The new blocks, int64 (n, P).

    Raises:
        DataError: a logit is not finite.
    """
    from transformers import DynamicCache

    length, cache = tokens.shape[1], DynamicCache()
    begun, places = tokens[:, :prompt], positions[:, :prompt]
    logits, cache = packed.cached(begun, places, attention_mask(places), cache)
    mask, place, pieces = attention_mask(places)[:, :, -1:], places[:, -1:], [begun]
    ended = begun[:, -1:] == end
    for step in range(prompt, length):
        last = logits[:, -1]
        if not bool(last.isfinite().all()):
            raise DataError("logits", f"after {step:,} tokens are not finite", expected="finite numbers")
        drawn = last.argmax(-1, keepdim=True) if greedy else torch.multinomial(last.float().softmax(-1), 1)
        drawn = drawn.masked_fill(ended, end)
        pieces.append(drawn)
        ended = ended | (drawn == end)
        if step + 1 == length or bool(ended.all()):
            break
        mask, place = torch.cat([mask, torch.ones_like(mask[..., :1])], -1), place + 1
        logits, cache = packed.cached(drawn, place, mask, cache)
    whole = torch.cat(pieces, 1)
    return torch.nn.functional.pad(whole, (0, length - whole.shape[1]), value=end)


def continuation_targets(tokens: Tensor, positions: Tensor, prompt: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the positions and targets to train on blocks of tokens, (n, P), that `generate` wrote.

    The targets, int64 (n, P), are the next tokens. Only generated tokens are targets, up to and including the first
    `end` token. All other targets are IGNORED. `prompt` is the number of tokens per block that were not generated. The
    argument `positions` has the positions before generation; the result has the positions after it.
    """
    length = tokens.shape[1]
    places = positions[:, prompt - 1 : prompt] + torch.arange(1, length - prompt + 1, device=tokens.device)
    following = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], 1)
    ended = (tokens == end) & (torch.arange(length, device=tokens.device) >= prompt - 1)
    # The end token is the last target.
    following = following.masked_fill(ended.cumsum(1) > 0, IGNORED)
    following[:, : prompt - 1] = IGNORED
    return torch.cat([positions[:, :prompt], places], 1), following
