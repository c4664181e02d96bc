"""What docs/row-functions.md promises of a function elsewhere, held against the runtime of a browser."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from isthmus.features.request.layout import MASKS, NOTES, Layout, output_name
from isthmus.orchestration.runtimes.web import NodeRunner, installed
from isthmus.package.golden import TensorBytes
from isthmus.transforms.rowwise.compiler import compile_columns
from isthmus.transforms.rowwise.core.expressions import traced
from tests.transforms.request.test_batches import drawn, everything, unlike
from tests.transforms.request.test_onerow import session
from tests.transforms.rowdraws import INPUTS
from tests.transforms.rowfunctions import EXACT, FAR, elsewhere

ROWS = 2000


@pytest.mark.accept
def test_a_browser_keeps_what_the_table_of_functions_promises(tmp_path: Path) -> None:
    with traced():
        graph, expressions = everything()
        runtime, columns = session(graph), drawn(ROWS)
        layout = Layout.loads(runtime.get_modelmeta().custom_metadata_map[NOTES])
        names, feeds = [*map(output_name, layout.outputs), MASKS], layout.feeds(columns)
        tensors = {name: TensorBytes.of(tensor) for name, tensor in feeds.items()}
        files = {"model.onnx": graph, "cases.json": msgspec.json.encode([tensors])}
        output = NodeRunner(installed(tmp_path)).run(
            "check.mjs", files, "model.onnx", "cases.json", kind=dict[str, Any]
        )
        (answer,) = output["answers"]
        found = {name: msgspec.convert(tensor, TensorBytes).array for name, tensor in answer.items()}
        differing = unlike(layout, dict(zip(names, runtime.run(names, feeds), strict=True)), found)
        wrong, allowed = [], set()
        for name, rows in differing.items():
            expression = expressions[name]
            promise = elsewhere(compile_columns({name: expression.column}, INPUTS).model)
            if promise == FAR:
                angle = columns[f"a_{expression.label.rpartition(' ')[2]}"].data
                rows = rows & (np.abs(angle.astype(float)) < 2.0**20)
            if promise == EXACT or (promise == FAR and rows.any()):
                wrong.append(f"{expression.label}: {np.count_nonzero(rows)} rows")
            else:
                allowed.add(expression.label.partition(" ")[0])
    assert wrong == []
    assert allowed <= {"sin", "cos", "tan", "cot", "sec", "csc", "pow", "**"}
