"""A causal model over packed blocks: what the student gives, what the teacher says, and how either writes on."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isthmus.distill.losses.logits import IGNORED
from isthmus.distill.types import Index
from isthmus.features.errors import DataError


def seen(positions: Tensor) -> Tensor:
    """Which tokens of a block each token attends to: those before it in its text, and itself, bool (n, 1, P, P)."""
    texts = (positions == 0).cumsum(1)
    order = torch.arange(positions.shape[1], device=positions.device)
    return (texts[:, None, :, None] == texts[:, None, None, :]) & (order[None, :] <= order[:, None])


class Packed(nn.Module):
    """A causal model of transformers. From tokens and positions, int64 (n, P), to logits (n, P, classes).

    With `kept`, the model's number of each token, tokens and classes are those alone.
    """

    kept: Tensor | None

    def __init__(self, model: Any, kept: Index | None = None) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("kept", None if kept is None else torch.from_numpy(kept), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The logits."""
        logits, _ = self.cached(tokens, positions, seen(positions))
        return logits

    def cached(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """The logits, and the cache of what was read, if there is one."""
        found = self.model(
            input_ids=tokens if self.kept is None else self.kept[tokens], position_ids=positions, attention_mask=mask,
            past_key_values=cache, use_cache=cache is not None,
        )  # fmt: skip
        logits: Tensor = found.logits
        return (logits if self.kept is None else logits[..., self.kept]), found.past_key_values


class CausalStudent(nn.Module):
    """A student over blocks: tokens, positions and targets, int64 (n, P).

    It gives `counts`, bool (n, P), where there is a target, and in training `logits` (n, P, classes). Outside of it,
    where the answers to all rows of a part are in memory together, it gives `losses` (n, P), 0 without a target, and
    `best`, the likeliest token.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.packed = Packed(model)

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self.packed.model

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The outputs."""
        logits, counts = self.packed(tokens, positions), targets != IGNORED
        if self.training:
            return {"logits": logits, "counts": counts}
        return {"losses": losses(logits, targets), "best": logits.argmax(-1), "counts": counts}


class CausalTeacher(nn.Module):
    """What a teacher says of the same blocks: `losses`, and what else its `keys` name.

    `logits` are of all tokens of the student. `sequence`, int64 (n, P), is the prompt of each block and what the
    teacher itself, taking the likeliest token, writes after it.
    """

    def __init__(self, packed: Packed, keys: tuple[str, ...], prompt: int, end: int) -> None:
        super().__init__()
        self.packed, self.keys, self.prompt, self.end = packed, keys, prompt, end

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The outputs."""
        logits = self.packed(tokens, positions)
        outputs = {"losses": losses(logits, targets)}
        if "logits" in self.keys:
            outputs["logits"] = logits
        if "sequence" in self.keys:
            outputs["sequence"] = written(self.packed, tokens, positions, self.prompt, self.end, greedy=True)
        return outputs


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each target, (n, P), and 0 where there is none."""
    return cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")


def written(packed: Packed, tokens: Tensor, positions: Tensor, prompt: int, end: int, *, greedy: bool) -> Tensor:
    """Blocks whose first `prompt` tokens are given and whose others the model writes, int64 (n, P).

    It takes the likeliest token, or draws one by torch's own generator. What it writes goes on in the last text of the
    prompt; behind a token that ends the text there are only such.
    """
    from transformers import DynamicCache

    length, cache = tokens.shape[1], DynamicCache()
    begun, places = tokens[:, :prompt], positions[:, :prompt]
    logits, cache = packed.cached(begun, places, seen(places), cache)
    mask, place, found = seen(places)[:, :, -1:], places[:, -1:], [begun]
    over = begun[:, -1:] == end
    for step in range(prompt, length):
        last = logits[:, -1]
        if not bool(last.isfinite().all()):
            raise DataError("logits", f"behind {step:,} tokens are not finite", expected="finite numbers")
        drawn = last.argmax(-1, keepdim=True) if greedy else torch.multinomial(last.float().softmax(-1), 1)
        drawn = drawn.masked_fill(over, end)
        found.append(drawn)
        over = over | (drawn == end)
        if step + 1 == length or bool(over.all()):
            break
        mask, place = torch.cat([mask, torch.ones_like(mask[..., :1])], -1), place + 1
        logits, cache = packed.cached(drawn, place, mask, cache)
    whole = torch.cat(found, 1)
    return torch.nn.functional.pad(whole, (0, length - whole.shape[1]), value=end)


def continued(tokens: Tensor, positions: Tensor, prompt: int, end: int) -> tuple[Tensor, Tensor]:
    """Positions and targets, int64 (n, P), of what `written` gives for blocks with these positions.

    A target is what was written, up to the first token that ends the text.
    """
    length = tokens.shape[1]
    places = positions[:, prompt - 1 : prompt] + torch.arange(1, length - prompt + 1, device=tokens.device)
    following = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], 1)
    ended = (tokens == end) & (torch.arange(length, device=tokens.device) >= prompt - 1)
    # The token that ends a text is a target itself; from it on nothing is.
    following = following.masked_fill(ended.cumsum(1) > 0, IGNORED)
    following[:, : prompt - 1] = IGNORED
    return torch.cat([positions[:, :prompt], places], 1), following
