"""Causal language models on blocks of packed texts: student, teacher, and text generation for training."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isthmus.distill.losses.logits import IGNORED
from isthmus.distill.types import Index
from isthmus.features.errors import DataError


def attention_mask(positions: Tensor) -> Tensor:
    """Return the attention mask, bool (n, 1, P, P), of n blocks of P tokens with several texts each.

    The mask is True where a token may attend: to itself and to earlier tokens of the same text. `positions`, (n, P),
    count from 0 at the start of each text.
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
        """Compute the logits of `tokens`, (n, P, classes), as a continuation of the tokens in the attention cache.

        Return the logits and `cache`, to which the call adds `tokens` in place; None without a cache. `mask`, bool (n,
        1, P, cached + P), is True where a token may attend to another.
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
    """Let a language model continue the first `prompt` tokens of each block; return the new blocks, int64 (n, P).

    The model continues the last text of these tokens. Each new token is the likeliest one if `greedy`; otherwise
    torch's global generator draws it. After an `end` token, only `end` follows. Raise a DataError if logits are not
    finite.
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
    """Return the positions and targets (next tokens), int64 (n, P) each, to train on blocks that `generate` wrote.

    Targets are the generated tokens up to and including the first `end` token; all others are IGNORED. `positions` are
    the positions of the blocks before generation.
    """
    length = tokens.shape[1]
    places = positions[:, prompt - 1 : prompt] + torch.arange(1, length - prompt + 1, device=tokens.device)
    following = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], 1)
    ended = (tokens == end) & (torch.arange(length, device=tokens.device) >= prompt - 1)
    # The end token is the last target.
    following = following.masked_fill(ended.cumsum(1) > 0, IGNORED)
    following[:, : prompt - 1] = IGNORED
    return torch.cat([positions[:, :prompt], places], 1), following
