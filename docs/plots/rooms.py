"""Draws the rooms of the packages, as import-linter knows them, and the ways of data through them.

`python docs/plots/rooms.py`
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".svg")

PACKAGES = (("orchestration",), ("distill", "serving"), ("transforms", "package"), ("features",))
"""From top to bottom: a package imports those below it."""
WAYS = {
    "a definition to a lookup": (
        "#1f77b4",
        """
        transforms.decorators features.definition features.contract orchestration.apply orchestration.tables
        transforms.tables transforms.views features.offline features.publishing features.online
        serving.redis serving.lookup serving.wire serving.http
        """,
    ),
    "a spine to a package": (
        "#d62728",
        """
        orchestration.training features.pointintime features.offline orchestration.models
        distill.distillation distill.tasks distill.teachers distill.outputs distill.training distill.export
        package.manifest
        """,
    ),
    "a request transform to an answer": (
        "#2ca02c",
        """
        transforms.decorators transforms.request transforms.rowwise features.contract features.request
        serving.lookup serving.wire serving.http
        """,
    ),
    "a package to a prediction": (
        "#9467bd",
        """
        package.manifest orchestration.verification orchestration.models serving.rollout serving.deployment
        serving.state serving.predict serving.http
        """,
    ),
    "an answer to its cause": (
        "#b5651d",
        """
        serving.http serving.recorder orchestration.recording features.offline orchestration.attribution
        features.document
        """,
    ),
}
WIDTH, ROOM, HEIGHT, STEP_X, STEP_Y = 1192, 104, 30, 112, 46
STYLE = """
text{font-family:system-ui,sans-serif;font-size:13px;fill:#222}
.p{fill:#f6f7f9;stroke:#b8c0cc}.r{fill:#fff;stroke:#8793a3}.t{font-weight:600;font-size:15px}.m{text-anchor:middle}
.n{text-anchor:middle;fill:#fff;font-size:10px;font-weight:600}
@media (prefers-color-scheme:dark){
text{fill:#e6e6e6}.p{fill:#1d2127;stroke:#4a5360}.r{fill:#2a3038;stroke:#6b7785}.n{fill:#fff}}
"""


def layers() -> dict[str, list[list[str]]]:
    """The rooms of each package, from its highest layer to its lowest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: dict[str, list[list[str]]] = {}
    for contract in project["tool"]["importlinter"]["contracts"]:
        container = contract.get("containers", [""])[0].removeprefix("isthmus.")
        if contract["type"] == "layers" and container in {name for row in PACKAGES for name in row}:
            seen: dict[str, None] = {}
            rows = []
            for layer in contract["layers"]:
                rooms = [room.strip().partition(".")[0] for room in layer.split("|")]
                rows.append([room for room in rooms if room not in seen])
                seen |= dict.fromkeys(rooms)
            found[container] = [row for row in rows if row]
    return found


def drawing() -> str:
    """The drawing, as SVG."""
    rooms, parts, places, top = layers(), list[str](), dict[str, tuple[float, float]](), 10
    for row in PACKAGES:
        width = (WIDTH - 20 - 10 * (len(row) - 1)) // len(row)
        most = width // STEP_X
        lines = {
            name: [line[at : at + most] for line in rooms[name] for at in range(0, len(line), most)] for name in row
        }
        height = 34 + STEP_Y * max(map(len, lines.values()))
        for column, name in enumerate(row):
            left = 10 + column * (width + 10)
            parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="10" class="p"/>')
            parts.append(f'<text x="{left + 12}" y="{top + 20}" class="t">{name}</text>')
            for number, line in enumerate(lines[name]):
                begin = left + (width - STEP_X * len(line) + STEP_X - ROOM) / 2
                for place, room in enumerate(line):
                    places[f"{name}.{room}"] = x, y = begin + STEP_X * place, top + 34 + STEP_Y * number
                    parts.append(f'<rect x="{x:g}" y="{y:g}" width="{ROOM}" height="{HEIGHT}" rx="5" class="r"/>')
                    parts.append(f'<text x="{x + ROOM / 2:g}" y="{y + 19:g}" class="m">{room}</text>')
        top += height + 10
    parts += _ways(places, top + 12)
    size, label = f"0 0 {WIDTH} {top + 34}", f"The rooms of the packages, and {len(WAYS)} ways of data through them"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{label}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def _ways(places: dict[str, tuple[float, float]], bottom: float) -> Iterator[str]:
    taken, left = dict[str, int](), 20.0
    for title, (color, rooms) in WAYS.items():
        for number, room in enumerate(rooms.split(), 1):
            x, y = places[room]
            beside = taken[room] = taken.get(room, -1) + 1
            yield _dot(x + 8 + 17 * beside, y, color)
            yield f'<text x="{x + 8 + 17 * beside:g}" y="{y + 4:g}" class="n">{number}</text>'
        yield _dot(left, bottom, color)
        yield f'<text x="{left + 14:g}" y="{bottom + 4:g}">{title}</text>'
        left += 48 + 7 * len(title)


def _dot(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="8" fill="{color}"/>'


if __name__ == "__main__":
    FILE.write_text(drawing())
