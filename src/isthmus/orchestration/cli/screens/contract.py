"""A contract, and the difference between two, as a person reads them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from isthmus.features.contract.contract import Column
from isthmus.orchestration.apply.contracts import (
    ContractDifference,
    LocatedContract,
    feature_rows,
    service_lines,
    transform_lines,
    transform_title,
    view_lines,
)
from isthmus.orchestration.cli.screens.terminal import new_console, new_table

if TYPE_CHECKING:
    from rich.console import Console

_OUTCOMES = {
    "same": "keep working as they are",
    "changed": "have to be made again",
    "new": "are still to be made",
    "gone": "can no longer run",
}


def show_contract(found: LocatedContract) -> None:
    """Prints what a contract says."""
    console, contract = new_console(), found.contract
    _line(console, f"project {contract.project}, contract {contract.hash[:12]}, of {found.place}")
    for view in contract.views.values():
        _section(console, f"view {view.name}", view_lines(view))
        _features(console, view.fields)
    for transform in contract.transforms.values():
        _section(console, transform_title(transform), transform_lines(transform))
        _features(console, transform.fields)
    for service in contract.services.values():
        _section(console, f"service {service.name}", service_lines(service))
    for kind in ("sources", "spines"):
        for name, form in contract.as_dict()[kind].items():
            _section(console, f"{kind[:-1]} {name}", {part.replace("_", " "): _text(part, form[part]) for part in form})

    if found.learned:
        _section(console, "what the training part taught", found.learned)


def show_contract_difference(found: ContractDifference) -> None:
    """Prints what changed, and what follows."""
    console = new_console()
    for word, one in (("from", found.before), ("to", found.after)):
        _line(console, f"{word:>4} {one.contract.hash[:12]}  {one.place}")
    console.print()
    for change in found.changes:
        _line(console, str(change))
    if not found.changes:
        _line(console, "nothing has changed")
    if found.learned:
        _line(console, "the training part taught otherwise about " + ", ".join(found.learned))
    if not found.services:
        return
    table = new_table("service", "its models", "hash before", "hash after", words=True)
    for service in found.services:
        declared = (one.contract.services.get(service.service) for one in (found.before, found.after))
        hashes = ("-" if known is None else known.hash[:12] for known in declared)
        color = "green" if service.outcome == "same" else "red"
        table.add_row(escape(service.service), f"[{color}]{_OUTCOMES[service.outcome]}[/]", *hashes)
    console.print(table)


def _features(console: "Console", fields: Sequence[Column]) -> None:
    table = new_table("feature", "type", "can exist", words=True)
    for row in feature_rows(fields):
        table.add_row(*map(escape, row))
    console.print(table)


def _section(console: "Console", title: str, lines: Mapping[str, str]) -> None:
    console.print()
    console.print(f"[bold]{escape(title)}[/]", highlight=False, soft_wrap=True)
    width = max(16, *map(len, lines))
    for name, text in lines.items():
        _line(console, f"{name:>{width}}  {text}")


def _line(console: "Console", text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)


def _text(part: str, value: Any) -> str:
    """A part of a declaration, from how it stands in the canonical form."""
    if part == "code":
        return str(value)[:12]
    if part == "label":
        return " ".join(value)
    if isinstance(value, list):
        # A number after a type is the size of its arrays.
        items = [" ".join(f"of {one}" if isinstance(one, int) else str(one) for one in item)
                 if isinstance(item, list) else item or '""' for item in value]  # fmt: skip
        return ", ".join(items) or "none"
    return "none" if value is None else str(value)
