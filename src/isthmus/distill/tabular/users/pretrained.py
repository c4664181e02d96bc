"""Predictions of a fine-tuned model of the transformers library, which reads a text."""

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isthmus.distill.accelerator import threads
from isthmus.distill.language.teachers import Pretrained
from isthmus.distill.tabular.users.prediction import Prediction
from isthmus.distill.tabular.users.sources import PredictionSource, TeacherRows, digest
from isthmus.distill.tasks.samples import Columns
from isthmus.distill.teachers.pretrained import PretrainedTeacher, model_folder, pretrained
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, Problem, extra, one_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNNAMED = re.compile(r"LABEL_\d+")
"""Names that transformers gives to classes without a name."""
_AT_ONCE = 32


class PretrainedSource(PredictionSource):
    runtime = f"torch {torch.__version__}"
    costly = True

    def __init__(self, declared: Pretrained, rows: TeacherRows) -> None:
        super().__init__(declared.source, declared.missing, rows)
        self._declared = declared
        texts = [item.name for item in rows.inputs if item.is_category]
        if declared.column is None and len(texts) != 1:
            found = f"{len(texts)} features are Strings" + (f": {', '.join(texts)}" if texts else "")
            raise ConfigurationError(self.where, [Problem("column", found, 'column="...", the text to read')])
        self._column = declared.column or texts[0]
        if self._column not in texts:
            raise ConfigurationError(self.where, [Problem("column", repr(self._column), one_of(texts))])

    @cached_property
    def _folder(self) -> Path:
        path = self._rows.root / self._declared.source
        return path if path.is_dir() else model_folder(self._declared.source, self._declared.revision)

    def identity(self) -> Any:
        declared, files = self._declared, sorted(self._folder.glob("*"))
        read = {file.name: digest(file) for file in files if file.suffix in (".json", ".safetensors", ".txt", ".model")}
        classes = None if declared.classes is None else list(declared.classes)
        return ["pretrained", read, self._column, classes, declared.tokens, self.runtime]

    @cached_property
    def _model(self) -> PretrainedTeacher:
        return pretrained(self._folder, ["logits"], labels=self._declared.classes)

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        with extra("text"):
            from transformers import AutoTokenizer
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self._folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            problem = Problem(str(self._folder), f"has no tokenizer that can be read: {error}", "tokenizer.json")
            raise ConfigurationError(self.where, [problem], remedy="call tokenizer.save_pretrained(folder)") from error
        config, problems = self._model.module.config, []
        if len(tokenizer) > config.vocab_size:
            found = f"has {len(tokenizer):,} tokens, and the model {config.vocab_size:,}"
            problems.append(Problem("tokenizer", found, "the tokenizer that the model was trained with"))
        pad = getattr(config, "pad_token_id", None)
        if pad is not None and tokenizer.pad_token_id not in (None, pad):
            found = f"pads with token {tokenizer.pad_token_id}, and the model with {pad}"
            problems.append(Problem("tokenizer", found, "the tokenizer that the model was trained with"))
        if problems:
            raise ConfigurationError(self.where, problems)
        return tokenizer

    def predict(self, rows: Columns) -> Prediction:
        values = rows[self._column]
        texts = np.where(values.valid, values.data, "").tolist()
        with threads(self._rows.threads):
            numbers = self._logits(texts)
        if self._rows.numeric:
            return Prediction("values", numbers)
        names = self._model.labels
        named = names is not None and not all(_UNNAMED.fullmatch(name) for name in names)
        return Prediction("logits", numbers, [*names] if names is not None and named else None)

    def _logits(self, texts: list[str]) -> Array:
        most = self._declared.tokens or min(self._tokenizer.model_max_length, self._positions)
        # Texts of about the same length have little padding.
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        parts: list[Tensor] = []
        for begin in range(0, len(order), _AT_ONCE):
            part = [texts[row] for row in order[begin : begin + _AT_ONCE]]
            read = self._tokenizer(part, padding=True, truncation=True, max_length=most, return_tensors="pt")
            parts.append(self._model.ask(dict(read))["logits"].float().cpu())
        logits = torch.cat(parts)
        result = np.empty(tuple(logits.shape), np.float64)
        result[order] = logits.numpy()
        return result

    @property
    def _positions(self) -> int:
        return int(getattr(self._model.module.config, "max_position_embeddings", None) or 512)

    def size(self) -> tuple[int, int] | None:
        return self._model.size()
