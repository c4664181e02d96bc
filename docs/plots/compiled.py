"""Draw the ONNX nodes that compute `block_minutes` of examples/flights: `python docs/plots/compiled.py`."""

from html import escape
from pathlib import Path

import onnx

from isthmus.project import Project

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".svg")
CODE = ["arrival_minute - minute_of_day", "F.pmod(…, F.lit(1440))", '.cast("float")']
TITLES = {"value": "ONNX: value", "null": "ONNX: not null?", "error": "ONNX: overflow?"}
WIDTH, STEP, BOX = 250, 56, 226


def graph() -> onnx.GraphProto:
    contract = Project(ROOT / "examples" / "flights").definitions.contract
    return onnx.load_from_string(contract.transforms["moment"].graph).graph


def chain(nodes: dict[str, onnx.NodeProto], output: str) -> list[str]:
    """Return the labels of the nodes from the inputs to an output, following the longest path."""
    node = nodes.get(output)
    if node is None or node.op_type == "Split":
        return ["arrival_minute, minute_of_day"]
    return [*max((chain(nodes, name) for name in node.input if not name.startswith("constant")), key=len), node.op_type]


def main() -> None:
    nodes = {output: node for node in graph().node for output in node.output}
    floats, masks = (
        next(node for name, node in nodes.items() if name == found) for found in ("found_float", "found_masks")
    )
    chains = {
        "value": chain(nodes, floats.input[2]),
        "null": chain(nodes, masks.input[2]),
        "error": chain(nodes, masks.input[8]),
    }
    height = 70 + STEP * max(map(len, chains.values()))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {260 + 3 * WIDTH} {height}" role="img">'
        "<title>A PySpark expression and the ONNX nodes that compute it</title><style>"
        "text{font-family:system-ui,sans-serif;text-anchor:middle;font-size:13px;fill:#1c2733}"
        ".c{font-family:ui-monospace,monospace;text-anchor:start;font-size:12px}.s{fill:#4d5b6b}"
        "rect{fill:#e4edf8;stroke:#5b7fa8}.i{fill:#fbf0d9;stroke:#b98a2f}"
        "line{stroke:#7b8794;stroke-width:1.5;marker-end:url(#h)}</style>"
        '<defs><marker id="h" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#7b8794"/></marker></defs>'
        f'<rect width="{260 + 3 * WIDTH}" height="{height}" style="fill:#fff;stroke:none"/>'
        '<text class="s" x="120" y="30">PySpark</text>'
    )
    parts = [head]
    parts += [f'<text class="c" x="14" y="{80 + 24 * n}">{escape(line)}</text>' for n, line in enumerate(CODE)]
    for column, (name, labels) in enumerate(chains.items()):
        x = 260 + WIDTH * column
        parts.append(f'<text class="s" x="{x + BOX / 2}" y="30">{TITLES[name]}</text>')
        for row, label in enumerate(labels):
            y = 46 + STEP * row
            kind = ' class="i"' if row == 0 else ""
            parts.append(f'<rect{kind} x="{x}" y="{y}" width="{BOX}" height="34" rx="5"/>')
            parts.append(f'<text x="{x + BOX / 2}" y="{y + 22}">{escape(label)}</text>')
            if row:
                parts.append(f'<line x1="{x + BOX / 2}" y1="{y - STEP + 34}" x2="{x + BOX / 2}" y2="{y - 1}"/>')
    FILE.write_text("".join(parts) + "</svg>\n")


if __name__ == "__main__":
    main()
