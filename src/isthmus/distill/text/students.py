"""Students that read the tokens of a text: a bag of embeddings, a small transformer encoder, or the user's module."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from isthmus.distill.causal.models import call_function
from isthmus.distill.language.text import Bag, Encoder, Text
from isthmus.distill.tabular.answers import StudentOutput
from isthmus.distill.tabular.student import UNCALIBRATED
from isthmus.distill.teachers.pretrained import pooled
from isthmus.features.errors import ConfigurationError, Problem


class TextStudent(nn.Module):
    """A network from tokens to the last layer's outputs (n, `answer.width`), and the output layer `answer`.

    In training mode the student returns uncalibrated scores. In eval mode it returns calibrated or clipped scores, or
    both by name if it has a calibration.
    """

    def __init__(self, network: nn.Module, answer: StudentOutput) -> None:
        super().__init__()
        self.network, self.answer = network, answer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | dict[str, Tensor]:
        scores = self.answer.scores(self.network(input_ids, attention_mask))
        if self.training:
            return scores
        final = self.answer.calibrate(scores)
        return final if self.answer.calibration is None else {"logits": final, UNCALIBRATED: scores}


class TextNetwork(nn.Module):
    """A student as a device runs it: from tokens to the answer, such as probabilities."""

    def __init__(self, student: TextStudent) -> None:
        super().__init__()
        self.student = student

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        answer: Tensor = self.student.answer(
            self.student.answer.scores(self.student.network(input_ids, attention_mask))
        )
        return answer


class BagNetwork(nn.Module):
    """The mean of the vectors of a text's tokens, and a linear layer."""

    def __init__(self, size: int, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.dropout, self.last = nn.Embedding(size, width), nn.Dropout(dropout), nn.Linear(width, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        last: Tensor = self.last(self.dropout(pooled(self.tokens(input_ids), attention_mask)))
        return last


class EncoderLayer(nn.Module):
    """A transformer layer that normalizes its inputs (Xiong et al., ICML 2020, arXiv:2002.04745)."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norms, self.dropout = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)]), nn.Dropout(dropout)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Transform states (n, tokens, width) with a mask, bool (n, 1, 1, tokens), that is True at real tokens."""
        rows, tokens, width = states.shape
        parts = self.attention(self.norms[0](states)).view(rows, tokens, 3 * self.heads, width // self.heads)
        query, key, value = parts.transpose(1, 2).chunk(3, dim=1)
        heads = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        states = states + self.dropout(self.mixed(heads.transpose(1, 2).reshape(rows, tokens, width)))
        changed: Tensor = states + self.dropout(self.down(gelu(self.up(self.norms[1](states)))))
        return changed


class EncoderNetwork(nn.Module):
    """A transformer encoder; the mean of its last states goes through a linear layer."""

    def __init__(self, size: int, declared: Encoder, tokens: int, outputs: int, dropout: float) -> None:
        super().__init__()
        width, rank = declared.width, declared.rank or declared.width
        self.tokens, self.positions = nn.Embedding(size, rank), nn.Embedding(tokens, width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.widened = nn.Identity() if declared.rank is None else nn.Linear(rank, width, bias=False)
        self.layers = nn.ModuleList(
            EncoderLayer(width, declared.heads, declared.inner, dropout) for _ in range(declared.layers)
        )
        self.norm, self.dropout, self.last = nn.LayerNorm(width), nn.Dropout(dropout), nn.Linear(width, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.widened(self.tokens(input_ids)) + self.positions.weight[: input_ids.shape[1]]
        states, mask = self.dropout(states), (attention_mask != 0)[:, None, None, :]
        for layer in self.layers:
            states = layer(states, mask)
        last: Tensor = self.last(self.dropout(pooled(self.norm(states), attention_mask)))
        return last


def text_network(declared: Text, size: int, outputs: int, where: str) -> nn.Module:
    """Create an untrained network for a vocabulary of `size` tokens, with `outputs` numbers per text.

    Raises a ConfigurationError at `where` if the user's function cannot be imported or returns anything else.
    """
    if isinstance(declared.student, Bag):
        return BagNetwork(size, declared.student.width, outputs, declared.dropout)
    if isinstance(declared.student, Encoder):
        return EncoderNetwork(size, declared.student, declared.tokens, outputs, declared.dropout)
    network = call_function(declared.student, where, size, outputs)
    if not isinstance(network, nn.Module):
        found = f"returns a {type(network).__name__}"
        raise ConfigurationError(where, [Problem(declared.student, found, "a torch module")])
    tokens = torch.ones((2, min(3, declared.tokens)), dtype=torch.int64)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        shape = tuple(getattr(network.eval()(tokens, tokens), "shape", ()))
    if shape != (2, outputs):
        problem = Problem(declared.student, f"its network returns {shape} for two texts", str((2, outputs)))
        raise ConfigurationError(where, [problem])
    return network.train()
