"""Output of `isthmus contract`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from isthmus.features.contract.diff import AVAILABLE, duration_text
from isthmus.features.contract.schema import Column, ServiceContract, TransformContract, ViewContract
from isthmus.features.document.blocks import Block, Fields, Heading, Paragraph, TableBlock, Text, bad, good
from isthmus.features.projectstatus import short
from isthmus.orchestration.apply.contracts import ContractDifference, LocatedContract

_OUTCOMES = {
    "same": "keep working as they are",
    "changed": "must be trained again",
    "new": "are not trained yet",
    "gone": "can no longer run",
}


def contract_blocks(source: LocatedContract) -> Iterator[Block]:
    contract = source.contract
    yield Paragraph(f"project {contract.project}, contract {short(contract.hash)}, from {source.place}")
    for view in contract.views.values():
        yield from _section(f"view {view.name}", _of_view(view), view.fields)
    for transform in contract.transforms.values():
        # In a contract, a request source with rules is a transform.
        kind = "source" if any(rule.source == transform.name for rule in transform.rules.values()) else "transform"
        yield from _section(f"request {kind} {transform.name}", _of_transform(transform), transform.fields)
    for service in contract.services.values():
        yield from _section(f"service {service.name}", _of_service(service))
    for kind in ("sources", "spines"):
        for name, form in contract.as_dict()[kind].items():
            parts = {part.replace("_", " "): _text(part, value) for part, value in form.items()}
            yield from _section(f"{kind[:-1]} {name}", parts)
    if source.learned:
        yield from _section("learned from the training part", source.learned)


def difference_blocks(difference: ContractDifference) -> Iterator[Block]:
    for word, source in (("from", difference.before), ("to", difference.after)):
        yield Paragraph(f"{word:>4} {short(source.contract.hash)}  {source.place}")
    yield Paragraph("")
    for change in difference.changes:
        yield Paragraph(str(change))
    if not difference.changes:
        yield Paragraph("nothing has changed")
    if difference.learned:
        yield Paragraph("training statistics differ for " + ", ".join(difference.learned))
    if difference.services:
        rows: list[list[Text]] = []
        for service in difference.services:
            style = good if service.outcome == "same" else bad
            declared = (side.contract.services.get(service.service) for side in (difference.before, difference.after))
            hashes = (short(None if contract is None else contract.hash) for contract in declared)
            rows.append([service.service, style(_OUTCOMES[service.outcome]), *hashes])
        yield TableBlock(["service", "its models", "hash before", "hash after"], rows)


def _section(title: str, lines: Mapping[str, str], fields: Sequence[Column] = ()) -> Iterator[Block]:
    yield Heading(title)
    yield Fields(list(lines.items()))
    if fields:
        rows = [[column.name, _type(column), AVAILABLE[column.available]] for column in fields]
        yield TableBlock(["feature", "type", "can exist"], rows)


def _of_view(view: ViewContract) -> dict[str, str]:
    return {
        "keys": _columns(view.keys),
        "entities": ", ".join(view.entities),
        "ttl": duration_text(view.ttl),
        "delay": duration_text(view.delay),
        "lookback": duration_text(view.lookback),
        "sources": ", ".join(view.sources) or "none",
        "version": str(view.version),
        "table": view.table,
        "code": short(view.code),
        "hash": short(view.hash),
    }


def _of_transform(transform: TransformContract) -> dict[str, str]:
    return {
        "takes": _pairs(transform.stored),
        "request fields": _columns(transform.request) or "none",
        **{f"of {name}": str(rule) for name, rule in transform.rules.items()},
        "graph": f"{len(transform.graph):,} bytes of ONNX",
        "hash": short(transform.hash),
    }


def _of_service(service: ServiceContract) -> dict[str, str]:
    return {
        "features": _pairs(service.features),
        "request fields": _columns(service.request) or "none",
        **({"computed": _pairs(service.computed)} if service.computed else {}),
        "hash": short(service.hash),
    }


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    groups = groupby(pairs, key=lambda pair: pair[0])
    return "; ".join(f"{owner}: {', '.join(name for _, name in part)}" for owner, part in groups) or "none"


def _columns(columns: Sequence[Column]) -> str:
    return ", ".join(f"{column.name} {_type(column)}" for column in columns)


def _type(column: Column) -> str:
    return column.dtype.name if column.size is None else f"{column.dtype} of {column.size}"


def _text(part: str, value: Any) -> str:
    if part == "code":
        return short(value)
    if part == "label":
        return " ".join(value)
    if isinstance(value, list):
        return ", ".join(map(_item, value)) or "none"
    return "none" if value is None else str(value)


def _item(value: Any) -> str:
    if isinstance(value, list):
        # An integer after a type is an array size.
        return " ".join(f"of {part}" if isinstance(part, int) else str(part) for part in value)
    return value or '""'
