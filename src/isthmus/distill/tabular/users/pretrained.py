"""Predictions of a fine-tuned model of the transformers library, which reads texts or images."""

import copy
import re
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.distill.accelerator import threads
from isthmus.distill.language.teachers import Pretrained
from isthmus.distill.tabular.users.prediction import Prediction
from isthmus.distill.tabular.users.sources import IMAGE, PredictionSource, TeacherRows, digest
from isthmus.distill.tasks.samples import Columns
from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.distill.teachers.pretrained import PretrainedTeacher, model_folder, pooled, pretrained
from isthmus.distill.types import Array
from isthmus.features.contract.schema import sha256
from isthmus.features.errors import ConfigurationError, Problem, extra, first_line, one_of
from isthmus.features.files import installed_path

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedTokenizerBase

LOGITS, EMBEDDING = "logits", "embedding"
_UNNAMED = re.compile(r"LABEL_\d+")
"""Names that transformers gives to classes without a name."""
_SEVERAL = "multi_label_classification"
_AT_ONCE = 32


class PretrainedModel:
    """A declared model of transformers and its tokenizer or image processor, each loaded when it is first used."""

    def __init__(self, declared: Pretrained, root: Path, keys: Sequence[str] = (LOGITS,)) -> None:
        self.declared, self._root, self._keys, self.where = declared, root, keys, f"teacher {declared.source}"

    @cached_property
    def folder(self) -> Path:
        declared = self.declared
        path = installed_path(declared.source, self.where) or self._root / declared.source
        return path if path.is_dir() else model_folder(declared.source, declared.revision)

    @cached_property
    def teacher(self) -> PretrainedTeacher:
        return pretrained(self.folder, self._keys, labels=self.declared.classes)

    @cached_property
    def processor(self) -> "BaseImageProcessor":
        """The image processor in the folder; raises a ConfigurationError if it cannot be read."""
        with extra("text"):
            from transformers import AutoImageProcessor
        try:
            # Pillow gives the same pixels with and without torchvision.
            processor: BaseImageProcessor = AutoImageProcessor.from_pretrained(
                self.folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, AttributeError, TypeError, ImportError) as error:
            found = f"has no image processor that can be read: {first_line(error)}"
            problem = Problem(str(self.folder), found, "preprocessor_config.json")
            raise ConfigurationError(self.where, [problem], remedy="call processor.save_pretrained(folder)") from error
        return processor

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer in the folder; raises a ConfigurationError if it is not the model's."""
        with extra("text"):
            from transformers import AutoTokenizer
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            problem = Problem(str(self.folder), f"has no tokenizer that can be read: {error}", "tokenizer.json")
            raise ConfigurationError(self.where, [problem], remedy="call tokenizer.save_pretrained(folder)") from error
        config, words, found = self.teacher.module.config, self.folder / "vocab.txt", []
        if tokenizer.pad_token_id is None:
            found.append("has no padding token")
        if len(tokenizer) > config.vocab_size:
            found.append(f"has {len(tokenizer):,} tokens, and the model {config.vocab_size:,}")
        pad = getattr(config, "pad_token_id", None)
        if pad is not None and tokenizer.pad_token_id not in (None, pad):
            found.append(f"pads with token {tokenizer.pad_token_id}, and the model with {pad}")
        if words.is_file():
            numbers = tokenizer.get_vocab()
            listed = enumerate(words.read_text(encoding="utf-8").rstrip("\n").split("\n"))
            if (word := next((word for number, word in listed if numbers.get(word) != number), None)) is not None:
                found.append(f"numbers {word!r} as {numbers.get(word)}, and vocab.txt does not")
        if found:
            expected = "the tokenizer that the model was trained with"
            raise ConfigurationError(self.where, [Problem("tokenizer", each, expected) for each in found])
        return tokenizer

    @cached_property
    def tokenizer_digest(self) -> str:
        """SHA-256 of the tokenizer, ignoring its padding and truncation settings."""
        tokenizer = copy.deepcopy(self.tokenizer.backend_tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return sha256(tokenizer.to_str())

    @property
    def tokens(self) -> int:
        """Number of tokens of a text that the model reads; raises a ConfigurationError if more are declared."""
        positions = int(getattr(self.teacher.module.config, "max_position_embeddings", None) or 512)
        if (self.declared.tokens or 0) > positions:
            raise ConfigurationError(self.where, [Problem("tokens", str(self.declared.tokens), f"at most {positions}")])
        return self.declared.tokens or min(int(self.tokenizer.model_max_length), positions)


class _ImageVectors(nn.Module):
    """A model's vectors of images: its own, as CLIP has them, else its pooled last states."""

    def __init__(self, model: nn.Module, *, first: bool) -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, pixel_values: Tensor) -> Tensor:
        model: Any = self.model
        states: Tensor
        if hasattr(model, "get_image_features"):
            states = model.get_image_features(pixel_values=pixel_values).pooler_output
        elif hasattr(model, "visual_projection"):
            states = model(pixel_values=pixel_values).image_embeds
        else:
            states = model.base_model(pixel_values=pixel_values).last_hidden_state
            if self.first and states.ndim != 3:
                raise ValueError('pooling="first" needs a model with tokens, and this one has maps: use "mean"')
            states = pooled(states, None, first=self.first)
        return states


class PretrainedSource(PredictionSource):
    runtime = f"torch {torch.__version__}"
    costly = True

    def __init__(self, declared: Pretrained, rows: TeacherRows) -> None:
        super().__init__(declared.source, declared.missing, rows)
        keys = (LOGITS, EMBEDDING) if rows.states else (LOGITS,)
        self._declared, self._loaded = declared, PretrainedModel(declared, rows.root, keys)
        self._column = IMAGE if rows.images is not None else self._text(declared, rows)

    def _text(self, declared: Pretrained, rows: TeacherRows) -> str:
        texts = [item.name for item in rows.inputs if item.is_category]
        if declared.column is None and len(texts) != 1:
            found = f"{len(texts)} features are Strings" + (f": {', '.join(texts)}" if texts else "")
            raise ConfigurationError(self.where, [Problem("column", found, 'column="...", the text to read')])
        column = declared.column or texts[0]
        if column not in texts:
            raise ConfigurationError(self.where, [Problem("column", repr(column), one_of(texts))])
        return column

    def identity(self) -> Any:
        declared, files = self._declared, sorted(self._loaded.folder.glob("*"))
        read = {file.name: digest(file) for file in files if file.suffix in (".json", ".safetensors", ".txt", ".model")}
        classes = None if declared.classes is None else list(declared.classes)
        resizing = [] if self._rows.images is None else [version("transformers"), version("pillow")]
        return ["pretrained", read, self._column, classes, declared.tokens, self.runtime, *resizing]

    def predict(self, rows: Columns) -> Prediction:
        values = rows[self._column]
        with threads(self._rows.threads):
            if self._rows.images is None:
                outputs = self._of_texts(np.where(values.valid, values.data, "").tolist())
            else:
                outputs = {LOGITS: self._of_images(values.data)}
        numbers, states = outputs[LOGITS], outputs.get(EMBEDDING)
        if self._rows.numeric:
            return Prediction("values", numbers, states=states)
        if self._rows.several and (kind := self._loaded.teacher.module.config.problem_type) != _SEVERAL:
            problem = Problem(
                "problem_type of config.json", repr(kind), f"{_SEVERAL!r}, or Classes() for one class a row"
            )
            raise ConfigurationError(self.where, [problem])
        names = self._loaded.teacher.labels
        named = names is not None and not all(_UNNAMED.fullmatch(name) for name in names)
        return Prediction("logits", numbers, [*names] if names is not None and named else None, states)

    @cached_property
    def _teacher(self) -> NetworkTeacher:
        """The model with the output that is learned of images: its logits, or for an Embedding its vector."""
        model, pooling = self._loaded.teacher, self._rows.pooling
        if pooling is None:
            return model
        return NetworkTeacher(_ImageVectors(model.module, first=pooling == "first"), ["vector"], name=self.name)

    def _of_images(self, images: Array) -> Array:
        parts, pixels = [], np.rint(images * 255).astype(np.uint8)
        try:
            for begin in range(0, len(pixels), _AT_ONCE):
                read = self._loaded.processor(
                    [*pixels[begin : begin + _AT_ONCE]], input_data_format="channels_first", return_tensors="pt"
                )
                (output,) = self._teacher.ask({"pixel_values": read["pixel_values"]}).values()
                parts.append(output.cpu())
        except (ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:  # of transformers
            found = f"image processor and model raise {type(error).__name__}: {first_line(error)}".rstrip(".")
            raise ConfigurationError(
                self.where, [Problem(str(self._loaded.folder), found, "a model of images in color and its processor")]
            ) from error
        outputs: Array = torch.cat(parts).numpy().astype(np.float64)
        return outputs

    def _of_texts(self, texts: list[str]) -> dict[str, Array]:
        tokenizer, most = self._loaded.tokenizer, self._loaded.tokens
        # Texts of about the same length have little padding.
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        parts: list[dict[str, Tensor]] = []
        for begin in range(0, len(order), _AT_ONCE):
            part = [texts[row] for row in order[begin : begin + _AT_ONCE]]
            read = tokenizer(part, padding=True, truncation=True, max_length=most, return_tensors="pt")
            parts.append(self._loaded.teacher.ask(dict(read)))
        places = np.argsort(order)
        return {key: torch.cat([part[key].float().cpu() for part in parts]).numpy().astype(np.float64)[places]
                for key in parts[0]}  # fmt: skip

    def size(self) -> tuple[int, int] | None:
        return self._loaded.teacher.size()
