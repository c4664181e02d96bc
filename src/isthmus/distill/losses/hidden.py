"""A loss of hidden states, `HiddenStates`: a student's layers compared with the teacher's."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from isthmus.distill.shapes import average, booleans, check_tensors, floats, select
from isthmus.features.errors import Problem


class HiddenStates(nn.Module):
    """Squared distance of hidden states after a learned projection (FitNets, Romero et al., 2015, arXiv:1412.6550).

    For transformers, see TinyBERT (Jiao et al., 2020, arXiv:1909.10351). With the student's states H_i of width d, the
    teacher's G_j of width e, and the layer map {i: j}, the loss is the mean over the pairs, the vectors that the mask
    selects, and their e numbers of (H_i W_i - G_j)². W_i, (d, e), is trained with the student if the widths of a pair
    differ, and is the identity otherwise.

    Args:
        layers: layer map from index of the student's state to index of the teacher's, both from 0 in the lists of
            states. If a model's first state is its embeddings, index 0 is the embeddings.
        student_widths: width of each of the student's states.
        teacher_widths: width of each of the teacher's states.

    Raises:
        ConfigurationError: the map is empty, or names a layer that does not exist.
    """

    def __init__(self, layers: Mapping[int, int], *, student_widths: Sequence[int], teacher_widths: Sequence[int]):
        super().__init__()
        self.layers = dict(layers)
        self.widths = {"student": tuple(student_widths), "teacher": tuple(teacher_widths)}
        problems = [] if layers else [Problem("layers", "no pair of layers", "{student's layer: teacher's layer}")]
        for pair in layers.items():
            for party, layer in zip(("student", "teacher"), pair, strict=True):
                count = len(self.widths[party])
                if not 0 <= layer < count:
                    problems.append(Problem(f"layers: {party}", f"layer {layer}", f"0 to {count - 1}"))
        check_tensors("hidden states", *problems)
        self.projections = nn.ModuleDict()
        for ours, theirs in layers.items():
            if (widths := (student_widths[ours], teacher_widths[theirs]))[0] != widths[1]:
                self.projections[str(ours)] = nn.Linear(*widths, bias=False)

    def forward(
        self, student: Sequence[Tensor], teacher: Sequence[Tensor] | Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the distance of the student's hidden states from the teacher's on a batch; 0 if `mask` has no True.

        The teacher's states get no gradient.

        Args:
            student: all of the student's states, each (..., width), for example (batch, tokens, width).
            teacher: all of the teacher's states, as a sequence, or as the single tensor (batch, states, ..., width)
                that the cache of teacher outputs returns.
            mask: bool (...), True for the vectors that count, like an attention mask; None for all.

        Raises:
            ConfigurationError: the number of states, or their types, shapes or devices, do not fit.
        """
        if isinstance(teacher, Tensor) and teacher.ndim > 1:
            teacher = teacher.unbind(1)
        counts = [
            Problem(party, f"{len(states)} states", str(len(self.widths[party])))
            for party, states in (("student", student), ("teacher", teacher))
            if len(states) != len(self.widths[party])
        ]
        check_tensors("hidden states", *counts)
        for ours, theirs in self.layers.items():
            check_tensors(
                f"hidden states {ours} -> {theirs}",
                student=floats(student[ours], f"... {self.widths['student'][ours]}"),
                teacher=floats(teacher[theirs], f"... {self.widths['teacher'][theirs]}"),
                mask=booleans(mask, "..."),
            )
        distances = []
        for ours, theirs in self.layers.items():
            state = select(student[ours], mask)
            if str(ours) in self.projections:
                state = self.projections[str(ours)](state)
            distances.append(average((state - select(teacher[theirs].detach(), mask)).square()))
        return sum(distances[1:], start=distances[0]) / len(distances)
