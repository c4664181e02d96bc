"""The task class of an `Embedding` of an `Image`: a student whose vectors are those of its teacher."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from isthmus.distill.declaration import Predictor
from isthmus.distill.evaluation.metrics import RECALL
from isthmus.distill.image.task import ImageTask, Unlabeled
from isthmus.distill.language.text import Embedding
from isthmus.distill.losses.objective import Objective
from isthmus.distill.outputs.form import OutputFormat
from isthmus.distill.tabular.answers import NumberOutput
from isthmus.distill.tabular.users.prediction import Prediction
from isthmus.distill.tabular.users.teacher import UserTeacher
from isthmus.distill.tasks.task import Batch, Material, Task
from isthmus.distill.tasks.vectors import COMPARED, TOLERANCE, VECTOR, require_searchable, search, vector_objective
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.errors import ConfigurationError, DataError, Problem

_KEYS = (VECTOR,)


class VectorOutput(NumberOutput):
    """Output layer for vectors (n, width): scale them to length 1."""

    def scores(self, last: Tensor) -> Tensor:
        # Normalize in float32: under autocast, the length would be off by a thousandth.
        return normalize(last.float(), dim=-1)

    def forward(self, scores: Tensor) -> Tensor:
        return scores


class Vectors(Unlabeled):
    key = VECTOR
    metric = RECALL
    pipeline = "image-feature-extraction"
    tolerance = TOLERANCE

    def __init__(self, declared: Embedding) -> None:
        self.recipe = {"pooling": declared.pooling}

    def answer(self) -> VectorOutput:
        return VectorOutput(VECTOR, -1, 1)

    def objective(self, declared: Predictor) -> Objective:  # noqa: ARG002 - the same for all
        return vector_objective(_KEYS)

    def teacher_scores(self, prediction: Prediction, where: str) -> Array:
        """Return the teacher's vectors, scaled to length 1; raise an error if they have no direction."""
        numbers = prediction.numbers
        if prediction.form != "values" or numbers.ndim != 2:
            found = f"{prediction.form}, shape {numbers.shape}"
            raise ConfigurationError(where, [Problem("output", found, f"({len(numbers)}, width), a vector per image")])
        lengths = np.linalg.norm(numbers, axis=1, keepdims=True)
        if unusable := int((~(np.isfinite(lengths) & (lengths > 0))).sum()):
            found = f"{unusable:,} of {len(numbers):,} vectors are missing, not finite, or zero"
            raise DataError(
                where, found, expected="vectors with a direction", remedy="leave such images out of the spine"
            )
        vectors: Array = numbers / lengths
        return vectors


class ImageEmbeddingTask(ImageTask):
    """Predicts the teacher's vector of an image. The label of the spine is not used."""

    form = OutputFormat()
    compared = COMPARED

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        require_searchable(self.material, _KEYS)

    def _labels(self, declared: Predictor) -> Vectors:
        embedding = declared.label
        assert isinstance(embedding, Embedding)  # noqa: S101 - an Embedding selects this task
        self.pooling = embedding.pooling
        return Vectors(embedding)

    def teacher(self) -> UserTeacher:
        return self._teacher

    @cached_property
    def _teacher(self) -> UserTeacher:
        return super().teacher()

    @cached_property
    def _outputs(self) -> int:
        """The width of the teacher's vectors, from its answer to one image."""
        return self._teacher.ask(self.asked(self.material.parts.train[:1]))[VECTOR].shape[1]

    def batch(self, rows: Tensor) -> Batch:
        return Batch((torch.from_numpy(self._shown(rows.numpy())),))

    def quality(self, answers: Answers, rows: Index, teacher: Answers) -> dict[str, float]:  # noqa: ARG002 - all rows
        return search(answers, teacher, _KEYS)

    def score(self, answers: Answers, rows: Index, teacher: Answers) -> float:
        return self.quality(answers, rows, teacher)[RECALL]

    agreement = Task.agreement
