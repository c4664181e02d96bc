"""The storage format of a teacher's outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from isthmus.distill.shapes import check_tensors, positive
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, DataError, Problem

LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class OutputFormat:
    """Storage format of a teacher's outputs.

    Attributes:
        dtype: "float16" or "float32" for floating-point outputs; integers are stored unchanged.
        top_k: number of largest probabilities to store instead of "logits", for `top_k_targets`; None stores the
            logits. The probabilities are softmax(logits / temperature): "probabilities" (rows, ..., k), largest first,
            "indexes" (rows, ..., k) int32, and "residual" (rows, ...), the total probability of all other classes.
        temperature: temperature of these probabilities; 1 without `top_k`.

    Raises:
        ConfigurationError: lists every invalid value.
    """

    dtype: Literal["float16", "float32"] = "float16"
    top_k: int | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        checks = [positive("temperature", self.temperature)]
        if self.dtype not in ("float16", "float32"):
            checks.append(Problem("dtype", repr(self.dtype), '"float16" or "float32"'))
        if self.top_k is not None and self.top_k < 1:
            checks.append(Problem("top_k", repr(self.top_k), "at least 1"))
        if self.top_k is None and self.temperature != 1:
            checks.append(
                Problem("temperature", repr(self.temperature), "1 without top_k, since logits are stored as they are")
            )
        check_tensors("form of outputs", *checks)

    def encode(self, answers: Mapping[str, Tensor], rows: Sequence[int] | Array, where: str) -> dict[str, Array]:
        """Convert a teacher's outputs to the arrays that a cache of teacher outputs stores, as `dtype` and `top_k` say.

        Args:
            answers: the teacher's outputs for n rows by key, each (n, ...). Floating-point outputs are float32.
            rows: the n row numbers, only for error messages.
            where: text that names the teacher, only for error messages.

        Raises:
            ConfigurationError: `top_k` is set, but there are no logits (n, ..., classes) with at least `top_k` classes,
                or the teacher has an output named "probabilities", "indexes" or "residual", as the arrays that are
                stored for the logits.
            DataError: `dtype` is "float16", and a number is too large for it.
        """
        if self.top_k is not None:
            answers = self._largest(answers, self.top_k, where)
        return {key: self._converted(key, answer.cpu().numpy(), rows, where) for key, answer in answers.items()}

    def _largest(self, answers: Mapping[str, Tensor], k: int, where: str) -> dict[str, Tensor]:
        without_logits = {key: answer for key, answer in answers.items() if key != "logits"}
        reserved = sorted({"probabilities", "indexes", "residual"} & set(without_logits))
        found = "the teacher returns it, and top_k uses this name"
        problems = [Problem(f"output {key}", found, "another name") for key in reserved]
        logits = answers.get("logits")
        if logits is None or logits.ndim < 2:
            output = f"the teacher returns {', '.join(answers)}" if logits is None else f"shape {tuple(logits.shape)}"
            problems.append(Problem("output logits", output, "logits (rows, ..., classes)"))
        elif logits.shape[-1] < k:
            problems.append(Problem("top_k", str(k), f"at most the {logits.shape[-1]} classes"))
        if problems or logits is None:
            raise ConfigurationError(where, problems)
        probabilities, indexes = torch.softmax(logits / self.temperature, -1).topk(k)
        residual = (1 - probabilities.sum(-1)).clamp(min=0)
        return {**without_logits, "probabilities": probabilities, "indexes": indexes.int(), "residual": residual}

    def _converted(self, key: str, values: Array, rows: Sequence[int] | Array, where: str) -> Array:
        if values.dtype.kind != "f":
            return values
        if self.dtype == "float16" and values.size and np.abs(values).max() > LARGEST:
            row = int(np.flatnonzero((np.abs(values) > LARGEST).reshape(len(values), -1).any(1))[0])
            worst = values[row].flat[np.abs(values[row]).argmax()]
            raise DataError(
                f"{where}, output {key}",
                f"row {rows[row]} holds {worst:g}",
                expected=f"at most {LARGEST:g}, the largest float16",
                remedy='store the outputs with OutputFormat(dtype="float32")',
            )
        return values.astype(self.dtype)
