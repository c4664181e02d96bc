"""HTML pages that need no network and no script, in light and dark, on a desk and on a phone: look, tables, figures.

What is handed in is HTML already: whoever has text escapes it.
"""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

_COLORS = """\
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675; --line: #d9dee5; --paper: #fff; --card: #f6f8fa;
  --bad: #b3261e; --good: #1b7f4b; --mark: #b3261e; --base: #8a95a5 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa6b5; --line: #333c48; --paper: #12161c;
  --card: #1a2029; --bad: #ff8a80; --good: #6fd8a4; --mark: #ff8a80; --base: #75818f } }
"""
_DRAWN = """\
svg { display: block; background: var(--paper); border: 1px solid var(--line); width: 100%; height: auto }
svg .base { stroke: var(--base); stroke-dasharray: 3 3 } svg circle { fill: var(--mark); fill-opacity: .5 }
svg rect { fill: var(--mark) }
"""
_STYLE = """\
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 68rem; padding: 1rem; color: var(--ink);
  background: var(--paper) }
h1 { font-size: 1.5rem; margin: .5rem 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 0 } p { margin: .3rem 0; color: var(--soft) }
h1, h3, p, code, td:first-child { overflow-wrap: anywhere }
.bad { color: var(--bad); font-weight: 600 } .good { color: var(--good) }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem; margin: .8rem 0 }
.wide { overflow-x: auto } .plots { display: flex; flex-wrap: wrap; gap: .8rem; margin: .6rem 0 }
figure { margin: 0; flex: 0 1 200px; min-width: 130px } figcaption { font-size: .8rem; color: var(--soft) }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
td, th { padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { color: var(--soft); font-weight: 500 } .n { text-align: right; font-variant-numeric: tabular-nums }
td.v { font-family: ui-monospace, monospace; overflow-wrap: anywhere; min-width: 6rem }
.share { background: var(--good); height: .5rem; min-width: 2.5rem; margin-top: .5rem; border-radius: 4px }
.share i { display: block; background: var(--bad); height: 100%; border-radius: 4px }
summary { cursor: pointer; color: var(--soft) } a { color: inherit }
@media (max-width: 40rem) { body { padding: .6rem; font-size: 14px } .card { padding: .6rem }
  .plots { flex-wrap: nowrap } .views td:nth-child(2), .views th:nth-child(2) { display: none }
  .sides th { display: none }
  .sides td { display: grid; grid-template-columns: 7.5rem 1fr; border: 0; text-align: left }
  .sides td::before { content: attr(data-of); color: var(--soft); font-family: system-ui, sans-serif }
  .sides tr + tr td:first-child { border-top: 1px solid var(--line) } }
"""


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """A page with a title, which is text, of some parts; empty ones are left out.

    Args:
        title: of the window.
        parts: what the page shows, from top to bottom.
        style: rules beyond those that all pages have.
    """
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_COLORS}{_STYLE}{_DRAWN}{style}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def figure(content: str, label: str, caption: str, *, width: int = 200, height: int = 200) -> str:
    """What an SVG of a width and height holds, with what a screen reader says of it and a caption."""
    box = f'viewBox="0 0 {width} {height}"'
    return (
        f'<figure><svg {box} role="img" aria-label="{label}">{content}</svg><figcaption>{caption}</figcaption></figure>'
    )


def image(shown: str, style: str = "") -> str:
    """What a figure draws, as the address of an image (`data:`) that stands alone: on the page of somebody else.

    Args:
        shown: a figure, as `figure` gives it.
        style: rules beyond those that all pages have.
    """
    head, content = shown[shown.index("<svg ") : shown.index("</svg>")].split(">", 1)
    width, height = head.split('"')[1].split()[2:]
    # The one is how large the image is, the other keeps what it draws from filling more.
    size = f'width="{width}" height="{height}" style="width: {width}px; height: {height}px; border: 0"'
    svg = f'{head} xmlns="http://www.w3.org/2000/svg" {size}><style>{_COLORS}{_DRAWN}{style}</style>{content}</svg>'
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = (), code: Sequence[str] = ()
) -> str:
    """A table that scrolls by itself where it is too wide.

    Args:
        columns: their names.
        rows: a cell per column.
        numbers: columns that are aligned to the right.
        code: columns of values, in a typewriter's letters.
    """
    kinds = [' class="n"' if c in numbers else ' class="v"' if c in code else "" for c in columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        # On a phone a cell stands below the last, and says itself of what it is.
        names = [f' data-of="{column}"' if tag == "td" and column else "" for column in columns]
        return "".join(f"<{tag}{kind}{of}>{cell}</{tag}>" for kind, of, cell in zip(kinds, names, cells, strict=True))

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table>\n<tr>{line("th", columns)}</tr>\n{body}\n</table></div>'
