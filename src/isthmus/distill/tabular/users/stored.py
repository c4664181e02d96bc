"""Outputs of a user's teacher that were computed elsewhere, joined to a training set by key and time."""

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.language.teachers import TeacherOutputs
from isthmus.distill.tabular.users.prediction import Form, Prediction
from isthmus.distill.tabular.users.sources import PredictionSource, TeacherRows, digest
from isthmus.distill.tasks.samples import Columns
from isthmus.distill.types import Index
from isthmus.features.errors import DataError
from isthmus.features.pointintime.join import cast, moments
from isthmus.features.pointintime.spine import spine_rows
from isthmus.features.types import UnixTimestamp
from isthmus.features.values.arrow import ARROW

_COLUMNS = ("probabilities", "logits", "log_probabilities", "values")


class StoredSource(PredictionSource):
    runtime = "a file of outputs"
    cached = False

    def __init__(self, declared: TeacherOutputs, rows: TeacherRows) -> None:
        super().__init__(declared.path, declared.missing, rows)
        self._declared = declared

    def identity(self) -> Any:
        classes = None if self._declared.classes is None else list(self._declared.classes)
        return ["outputs", digest(self._file(self._declared.path)), classes]

    def predict(self, rows: Columns) -> Prediction:  # noqa: ARG002 - it has no answer for any
        raise DataError(self.where, f"has outputs only for rows of {self.name}", expected="a teacher that can run",
                        remedy="declare a TeacherFunction or an Onnx to explain other rows")  # fmt: skip

    def predict_rows(self, rows: Index) -> Prediction:
        form, numbers, classes, _ = self._stored
        places = self._places[rows]
        chosen = numbers[places]
        chosen[places < 0] = np.nan
        return Prediction(form, chosen, classes)

    @cached_property
    def _read(self) -> tuple[str, pa.Table]:
        spine = self._rows.spine
        types = {name: dtype for entity in spine.entities for name, dtype in entity.join_keys.items()}
        types["event_timestamp"] = UnixTimestamp
        source = spine_rows(self._file(self._declared.path), types)
        if absent := [name for name in types if name not in source.schema.names]:
            found = f"{self.name} lacks the column {', '.join(absent)}"
            raise DataError(self.where, found, expected=f"the columns {', '.join(types)} and one of outputs")
        outputs = [name for name in _COLUMNS if name in source.schema.names]
        if outputs == ["log_probabilities"] and not {"classes"} <= {*source.schema.names}:
            found = f"{self.name} has log_probabilities, and no column classes"
            raise DataError(self.where, found, expected="lists of class names beside the lists of numbers")
        if len(outputs) != 1:
            found = f"{self.name} has the columns {', '.join(source.schema.names)}"
            raise DataError(self.where, found, expected=f"one of {', '.join(_COLUMNS)}")
        wanted = [*types, *outputs, *(["classes"] if outputs == ["log_probabilities"] else [])]
        batches = [batch.select(wanted) for batch in source.batches()]
        table = pa.Table.from_batches(batches, schema=pa.schema([source.schema.field(name) for name in wanted]))
        try:
            keys = {name: cast(table, name, ARROW[types[name].name], 0) for name in types if name != "event_timestamp"}
            keys["event_timestamp"] = pa.chunked_array([pa.array(moments(table, 0))])
        except DataError as error:
            raise DataError(f"{self.where}: {self.name}", f"{error.where} {error.found}", expected=error.expected,
                            remedy=error.remedy) from None  # fmt: skip
        return outputs[0], pa.table({**keys, **{name: table[name] for name in wanted if name not in keys}})

    @cached_property
    def _places(self) -> Index:
        """The row of the file for each row of the training set, -1 if there is none."""
        (output, stored), ours = self._read, self._rows.table
        names = [name for name in stored.column_names if name not in (output, "classes")]
        left = {name: cast(ours, name, stored[name].type, 0) for name in names if name != "event_timestamp"}
        left["event_timestamp"] = pa.chunked_array([pa.array(moments(ours, 0))])
        numbered = pa.table({**left, "ours": np.arange(len(ours))})
        joined = numbered.join(stored.select(names).append_column("theirs", pa.array(np.arange(len(stored)))), names)
        if len(joined) > len(ours):
            twice = joined.group_by("ours").aggregate([("theirs", "count")])
            row = twice.filter(pc.greater(twice["theirs_count"], 1))["ours"][0].as_py()
            key = ", ".join(f"{name} {ours[name][row].as_py()}" for name in names)
            raise DataError(self.where, f"{self.name} has several rows for {key}", expected="one row for each example")
        places = np.full(len(ours), -1, np.int64)
        places[joined["ours"].to_numpy()] = pc.fill_null(joined["theirs"], -1).to_numpy()
        return places

    @cached_property
    def _stored(self) -> Prediction:
        name, table = self._read
        column = table[name].combine_chunks()
        listed = pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or _fixed(column.type)
        vectors = self._rows.pooling is not None
        if name in ("values", "log_probabilities") and listed == (name == "values" and not vectors):
            expected = "a number for each row" if listed else "lists in a Parquet file"
            raise DataError(f"{self.where}: {name}", f"a column of type {column.type}", expected=expected)
        if not listed:
            try:
                numbers = pc.cast(column, pa.float64()).to_numpy(zero_copy_only=False)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                expected = "numbers, or lists of numbers in a Parquet file"
                raise DataError(f"{self.where}: {name}", str(error), expected=expected) from error
            return Prediction(_form(name), numbers, self._declared.classes)
        if name == "log_probabilities":
            if self._rows.several:
                raise DataError(f"{self.where}: {name}", "names the likeliest of classes that exclude each other",
                                expected="probabilities or logits, for several labels per row")  # fmt: skip
            return self._top_k(column, table["classes"].combine_chunks())
        widths = pc.unique(pc.list_value_length(column).drop_null())
        if len(widths) != 1:
            raise DataError(f"{self.where}: {name}", f"lists of {len(widths)} lengths", expected="lists of one length")
        numbers = np.full((len(column), widths[0].as_py()), np.nan)
        known = column.is_valid().to_numpy(zero_copy_only=False)
        flat = pc.cast(column.drop_null().flatten(), pa.float64()).to_numpy(zero_copy_only=False)
        numbers[known] = flat.reshape(-1, numbers.shape[1])
        return Prediction(_form(name), numbers, self._declared.classes)

    def _top_k(self, column: pa.Array, names: pa.Array) -> Prediction:
        """Spread the mass that the k classes leave evenly over the classes that a row does not name."""
        lengths, theirs = (pc.list_value_length(each).to_numpy(zero_copy_only=False) for each in (column, names))
        if not np.array_equal(lengths, theirs, equal_nan=True):
            raise DataError(f"{self.where}: classes", "lists of other lengths than log_probabilities", expected="equal")
        codes = names.flatten().dictionary_encode()
        named = [str(name) for name in codes.dictionary.to_pylist()]
        classes = [*dict.fromkeys([*(self._rows.classes or ("0", "1")), *named])]
        counts = np.nan_to_num(lengths).astype(np.int64)
        rows = np.repeat(np.arange(len(counts)), counts)
        mass = np.exp(pc.cast(column.flatten(), pa.float64()).to_numpy(zero_copy_only=False))
        numbers = np.zeros((len(counts), len(classes)))
        columns = np.array([classes.index(name) for name in named], np.int64)
        numbers[rows, columns[codes.indices.to_numpy(zero_copy_only=False)]] = mass
        others = len(classes) - counts
        rest = np.maximum(0.0, 1 - numbers.sum(1)) / np.maximum(others, 1)
        numbers = np.where(numbers > 0, numbers, rest[:, None])
        numbers[counts == 0] = np.nan
        return Prediction("probabilities", numbers, classes)


def _form(name: str) -> Form:
    return name if name in ("logits", "values") else "probabilities"  # type: ignore[return-value]


def _fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind))
