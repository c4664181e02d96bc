"""Write a document as one HTML page without scripts or network access, in light and dark, for desktops and phones."""

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

from isthmus.features.document import blocks, charts
from isthmus.features.document.blocks import Block, Figure, Heading, StyledText, TableBlock, Text, plain

_COLORS = """\
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675; --line: #d9dee5; --paper: #fff; --card: #f6f8fa;
  --bad: #b3261e; --good: #1b7f4b }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa6b5; --line: #333c48; --paper: #12161c;
  --card: #1a2029; --bad: #ff8a80; --good: #6fd8a4 } }
"""
_STYLE = """\
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 68rem; padding: 1rem; color: var(--ink);
  background: var(--paper) }
h1 { font-size: 1.5rem; margin: .5rem 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 1rem 0 0 } .card h3 { margin: 0 } p, ul { margin: .3rem 0; color: var(--soft) }
ul { padding-left: 1.2rem }
h1, h3, p, li, code, td:first-child { overflow-wrap: anywhere } td:first-child { min-width: 5rem }
.bad { color: var(--bad); font-weight: 600 } .good { color: var(--good) }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem; margin: .8rem 0 }
.wide, pre { overflow-x: auto } .wide { margin-bottom: .8rem }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(320px, 100%), 1fr)); gap: .8rem;
  margin: .6rem 0 }
figure { margin: 0; max-width: 44rem } figcaption { font-size: .8rem; color: var(--soft) }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
td, th { padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { color: var(--soft); font-weight: 500 } .n { text-align: right; font-variant-numeric: tabular-nums }
td.n { white-space: nowrap } td.n small { white-space: normal }
td.v { font-family: ui-monospace, monospace; white-space: nowrap }
.sides td.v { overflow-wrap: anywhere; min-width: 6rem; white-space: normal }
td svg { border: 0; background: none; margin-top: .2rem }
.drawn { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: center; gap: 0 1rem }
.drawn span { min-width: 6rem }
summary { cursor: pointer; color: var(--soft) } a { color: inherit }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .6rem 0; overflow-wrap: anywhere }
i.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; background: var(--m) }
.halves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: .8rem }
.halves .card { margin: 0 } .halves td:first-child { width: 40% }
@media (max-width: 40rem) { body { padding: .6rem; font-size: 14px } .card { padding: .6rem }
  td.n { white-space: normal } .sides th, .records th { display: none }
  .records tr { display: flex; flex-wrap: wrap; gap: .1rem .6rem; padding: .4rem 0;
    border-bottom: 1px solid var(--line) }
  .records td { min-width: 3.9rem; max-width: 100%; padding: 0; border: 0; text-align: left }
  .records td:first-child { flex-basis: 100%; font-weight: 600 }
  .records td:empty, .records tr:has(th) { display: none }
  .records td + td::before { display: block; content: attr(data-of); color: var(--soft);
    font: .75rem system-ui, sans-serif }
  .sides td { display: grid; grid-template-columns: 7.5rem 1fr; border: 0; text-align: left }
  .sides td::before { content: attr(data-of); color: var(--soft); font-family: system-ui, sans-serif }
  .sides tr + tr td:first-child { border-top: 1px solid var(--line) } }
"""
_SENTENCES = ("good", "bad")
"""Styles of sentences in tables; backticks in them mark code."""
_PHONE = 5
"""The most columns of a table that fit on a phone; wider tables are shown there as one record per row."""
_CONTENTS = 4
"""Pages with at least this many sections begin with links to them."""
_SPANS: dict[blocks.Style, str] = {
    "good": '<span class="good">{}</span>',
    "bad": '<span class="bad">{}</span>',
    "strong": "<b>{}</b>",
    "code": "<code>{}</code>",
    "absent": "<i>{}</i>",
    "aside": "<br><small>{}</small>",
}


def to_html(title: str, blocks: Iterable[Block]) -> str:
    all_blocks = list(blocks)
    headings = [block for block in all_blocks if isinstance(block, Heading) and block.level == 2]
    links = " ".join(f'<a href="#{_slug(heading)}">{escape(plain(heading.text))}</a>' for heading in headings)
    shown = [*map(_block, all_blocks)]
    if len(headings) >= _CONTENTS:
        shown.insert(1, f"<nav>{links}</nav>")
    body = "\n".join(shown)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_COLORS}{_STYLE}{charts.STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _slug(heading: Heading) -> str:
    return re.sub(r"\W+", "-", plain(heading.text)).strip("-").lower()


def _anchor(heading: Heading) -> str:
    return f' id="{_slug(heading)}"' if heading.level == 2 else ""


def image(figure: Figure) -> str:
    size = f'width="{figure.width}" height="{figure.height}"'
    # The attributes set the size of the image; the CSS keeps the drawing from growing beyond it.
    size += f' style="width: {figure.width}px; height: {figure.height}px; border: 0"'
    css = f"<style>{_COLORS}{charts.STYLE}</style>"
    svg = _svg(figure, f'xmlns="http://www.w3.org/2000/svg" {size}', css)
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def _sentence(text: Text) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", _inline(text))


def _block(block: Block) -> str:
    match block:
        case blocks.Heading(text, level):
            return f"<h{level}{_anchor(block)}>{_inline(text)}</h{level}>"
        case blocks.Paragraph(text):
            return f"<p>{_sentence(text)}</p>"
        case blocks.Bullets(items):
            return f"<ul>{''.join(f'<li>{_sentence(item)}</li>' for item in items)}</ul>"
        case blocks.Code(text, file):
            return f"<p>{escape(file)}</p><pre>{escape(text)}</pre>"
        case blocks.Fields(rows):
            return _table(TableBlock(["", ""], rows))
        case blocks.Legend(entries):
            return "\n".join(
                f'<p class="{color}"><i class="dot"></i> <b>{escape(name)}</b> {_sentence(about)}</p>'
                for color, name, about in entries
            )
        case Figure():
            return f"<figure>{_svg(block)}<figcaption>{escape(block.caption)}</figcaption></figure>"
        case TableBlock():
            return _table(block)
    return _group(block)


def _group(group: blocks.BlockGroup) -> str:
    title, body = _inline(group.title), "".join(map(_block, group.blocks))
    if group.layout == "details":
        return f"<details><summary>{title}</summary>{body}</details>"
    if group.layout == "card":
        return f'<section class="card">{f"<h3>{title}</h3>" if title else ""}{body}</section>'
    return f'<div class="{group.layout}">{body}</div>'


def _table(table: TableBlock) -> str:
    names = list(map(escape, table.columns))
    kinds = [
        ' class="n"' if name in table.numbers else ' class="v"' if name in table.code else "" for name in table.columns
    ]
    # Phones hide the header and show the name of the column next to each cell.
    marks = [f'{kind} data-of="{name}"' if name else kind for kind, name in zip(kinds, names, strict=True)]

    def line(tag: str, attributes: Sequence[str], cells: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}{a}>{cell}</{tag}>' for a, cell in zip(attributes, cells, strict=True))}</tr>"

    head = f"{line('th', kinds, names)}\n" if any(names) else ""
    body = "\n".join(line("td", marks, map(_inline, row)) for row in table.rows)
    shown = f'<div class="wide"><table>\n{head}{body}\n</table></div>'
    layout = table.layout or ("records" if len(names) > _PHONE else "")
    return f'<div class="{layout}">{shown}</div>' if layout else shown


def _inline(text: Text) -> str:
    match text:
        case str():
            return escape(text)
        case StyledText(words, style):
            shown = escape(words)
            return _SPANS[style].format(
                re.sub("`([^`]+)`", r"<code>\1</code>", shown) if style in _SENTENCES else shown
            )
        case Figure():
            return _svg(text, f'style="width: {text.width}px"')
    figures = [part for part in text if isinstance(part, Figure)]
    words = "".join(_inline(part) for part in text if not isinstance(part, Figure))
    return f'<div class="drawn"><span>{words}</span>{"".join(map(_inline, figures))}</div>' if figures else words


def _svg(figure: Figure, attributes: str = "", css: str = "") -> str:
    box = f'viewBox="0 0 {figure.width} {figure.height}" role="img" aria-label="{escape(figure.label)}"'
    return f"<svg {' '.join(filter(None, (box, attributes)))}>{css}{figure.content}</svg>"
