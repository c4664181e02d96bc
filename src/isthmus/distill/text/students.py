"""Students that read the tokens of a text: a bag of embeddings, a small transformer encoder, or the user's module."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize, scaled_dot_product_attention

from isthmus.distill.causal.models import call_function
from isthmus.distill.language.objective import STATE
from isthmus.distill.language.text import Bag, Encoder, Text
from isthmus.distill.tabular.answers import LabelStudent, StudentOutput
from isthmus.distill.tabular.preparation import Prepare
from isthmus.distill.tabular.student import Student
from isthmus.distill.teachers.pretrained import pooled
from isthmus.distill.teachers.taps import tapped
from isthmus.features.errors import ConfigurationError, Problem

HIDDEN = 32
"""Units of the hidden layer for inputs beside a text."""


class JoinedStudent(Student):
    """A network of a text, and one of its other inputs with a hidden layer; their outputs are added."""

    def __init__(self, network: nn.Module, prepare: Prepare, dropout: float, answer: StudentOutput) -> None:
        super().__init__(prepare, (HIDDEN,), dropout, answer)
        self.network = network

    def last(self, *inputs: Tensor) -> Tensor:
        """Return the outputs of the last layers for tokens, their mask, prepared numbers and places of texts."""
        input_ids, attention_mask, *prepared = inputs
        last: Tensor = self.network(input_ids, attention_mask) + super().last(*prepared)
        return last


class Stateful(nn.Module):
    """Makes a student also return the pooled last state of its `EncoderNetwork` in training, beside scores at `key`."""

    network: nn.Module
    key: str

    def forward(self, *inputs: Tensor) -> Any:
        with tapped(self.network, [STATE]) as seen:
            outputs = super().forward(*inputs)
        return {self.key: outputs, STATE: seen[STATE]} if self.training else outputs


class StatefulStudent(Stateful, LabelStudent):
    pass


class StatefulJoinedStudent(Stateful, JoinedStudent):
    pass


class TextNetwork(nn.Module):
    """A student as a device runs it: from tokens, and prepared inputs if any, to the answer, such as probabilities."""

    def __init__(self, student: LabelStudent | JoinedStudent) -> None:
        super().__init__()
        self.student = student

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *prepared: Tensor) -> Tensor:
        answer: Tensor = self.student.answer(
            self.student.answer.scores(self.student.last(input_ids, attention_mask, *prepared))
        )
        return answer


class VectorNetwork(nn.Module):
    """A network from tokens to a vector, scaled to length 1."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        # Normalize in float32: under autocast, the length would be off by a thousandth.
        return normalize(self.network(input_ids, attention_mask).float(), dim=-1)


class EmbeddingModel(nn.Module):
    """Embeds one or more columns of texts, each given as tokens and mask, with the same network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.embedder = VectorNetwork(network)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.embedder(*text) for text in zip(inputs[::2], inputs[1::2], strict=True))


class PooledStates(nn.Module):
    """The pooled last states of a model of the transformers library."""

    def __init__(self, model: nn.Module, *, first: bool) -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return pooled(states, attention_mask, first=self.first)


class BagNetwork(nn.Module):
    """The mean of the vectors of a text's tokens, and a linear layer."""

    def __init__(self, size: int, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.dropout, self.last = nn.Embedding(size, width), nn.Dropout(dropout), nn.Linear(width, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        last: Tensor = self.last(self.dropout(pooled(self.tokens(input_ids), attention_mask)))
        return last


class BertForm(NamedTuple):
    """How the encoder of a pruned BERT differs from others; it also normalizes the output of each layer, not the input.

    Attributes:
        vocabulary: number of tokens; several of them may share an embedding.
        head_width: numbers in a head's queries, keys and values.
        epsilon: constant of the norms.
        first: True to use the last state of the first token, False for the mean.
    """

    vocabulary: int
    head_width: int
    epsilon: float
    first: bool


class EncoderLayer(nn.Module):
    """A transformer layer that normalizes its inputs (Xiong et al., 2020, arXiv:2002.04745), or a layer of BERT."""

    def __init__(self, declared: Encoder, dropout: float, bert: BertForm | None) -> None:
        super().__init__()
        width, self.heads, self.norm_first = declared.width, declared.heads, bert is None
        self.head_width = bert.head_width if bert else width // declared.heads
        inner, epsilon = self.heads * self.head_width, bert.epsilon if bert else 1e-5
        self.attention, self.mixed = nn.Linear(width, 3 * inner), nn.Linear(inner, width)
        self.up, self.down = nn.Linear(width, declared.inner), nn.Linear(declared.inner, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width, epsilon) for _ in range(2)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Transform states (n, tokens, width) with a mask, bool (n, 1, 1, tokens), that is True at real tokens."""
        first, second = self.norms
        if self.norm_first:
            states = states + self.dropout(self._attend(first(states), mask))
            changed: Tensor = states + self.dropout(self.down(gelu(self.up(second(states)))))
        else:
            states = first(states + self.dropout(self._attend(states, mask)))
            changed = second(states + self.dropout(self.down(gelu(self.up(states)))))
        return changed

    def _attend(self, states: Tensor, mask: Tensor) -> Tensor:
        rows, tokens, _ = states.shape
        parts = self.attention(states).view(rows, tokens, 3 * self.heads, self.head_width)
        query, key, value = parts.transpose(1, 2).chunk(3, dim=1)
        heads = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed: Tensor = self.mixed(heads.transpose(1, 2).reshape(rows, tokens, -1))
        return mixed


class EncoderNetwork(nn.Module):
    """A transformer encoder; its pooled last states go through a linear layer."""

    places: Tensor | None

    def __init__(
        self, size: int, declared: Encoder, tokens: int, outputs: int, dropout: float, bert: BertForm | None = None
    ) -> None:
        super().__init__()
        width, rank, self.bert = declared.width, declared.rank or declared.width, bert
        self.register_buffer("places", torch.zeros(bert.vocabulary, dtype=torch.int64) if bert else None)
        self.tokens, self.positions = nn.Embedding(size, rank), nn.Embedding(tokens, width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.widened = nn.Identity() if declared.rank is None else nn.Linear(rank, width, bias=False)
        self.layers = nn.ModuleList(EncoderLayer(declared, dropout, bert) for _ in range(declared.layers))
        self.norm = nn.LayerNorm(width, bert.epsilon if bert else 1e-5)
        self.state, self.dropout, self.last = nn.Identity(), nn.Dropout(dropout), nn.Linear(width, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = input_ids if self.places is None else self.places[input_ids]
        states = self.widened(self.tokens(places)) + self.positions.weight[: input_ids.shape[1]]
        states = self.dropout(self.norm(states) if self.bert else states)
        mask = (attention_mask != 0)[:, None, None, :]
        for layer in self.layers:
            states = layer(states, mask)
        states = states if self.bert else self.norm(states)
        vector = pooled(states, attention_mask, first=self.bert is not None and self.bert.first)
        last: Tensor = self.last(self.dropout(self.state(vector)))
        return last


def text_network(declared: Text, size: int, outputs: int, where: str) -> nn.Module:
    """Create an untrained network for a vocabulary of `size` tokens, with `outputs` numbers per text.

    Raises a ConfigurationError at `where` if the user's function cannot be imported or returns anything else.
    """
    if isinstance(declared.student, Bag):
        return BagNetwork(size, declared.student.width, outputs, declared.dropout)
    if isinstance(declared.student, Encoder):
        return EncoderNetwork(size, declared.student, declared.tokens, outputs, declared.dropout)
    assert isinstance(declared.student, str)  # noqa: S101 - a PrunedEncoder is cut from its teacher
    network = call_function(declared.student, where, size, outputs)
    if not isinstance(network, nn.Module):
        found = f"returns a {type(network).__name__}"
        raise ConfigurationError(where, [Problem(declared.student, found, "a torch module")])
    tokens = torch.ones((2, min(3, declared.tokens)), dtype=torch.int64)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = f"returns {tuple(getattr(network.eval()(tokens, tokens), 'shape', ()))}"
    except Exception as error:  # noqa: BLE001 - code of the user
        found = f"raises {type(error).__name__}: {error}"
    if found != f"returns {(2, outputs)}":
        problem = Problem(declared.student, f"its network {found} for two texts", str((2, outputs)))
        raise ConfigurationError(where, [problem])
    return network.train()
