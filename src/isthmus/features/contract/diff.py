"""Describes the differences between two contracts, and the services whose models stop running because of them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.features.contract.schema import Contract, FieldRule, ViewContract
from isthmus.features.errors import ContractMismatch

_COLUMNS = {"keys": "key", "fields": "feature", "features": "feature", "request": "request field",
            "stored": "stored feature", "computed": "computed feature"}  # fmt: skip
"""Parts that are lists of columns ([name, type], then optionally availability and size), and the noun for a column."""

_PAIRS = ("features", "stored", "computed")
"""Parts that are lists of [view, feature], or of [transform, field] for `computed`."""

_TIMES = ("ttl", "delay", "lookback")
"""Parts in microseconds; None is unlimited."""

_LEFT_OUT = {"version": 1}
"""Values of parts that the canonical form omits."""

AVAILABLE = {"server": "on the server only", "device": "on devices, too", "request": "wherever the request is"}

_UNITS = (("day", 86_400_000_000), ("hour", 3_600_000_000), ("minute", 60_000_000), ("second", 1_000_000))
_PLAIN = re.compile(r"(?!none\Z)[\w.-]+\Z")
_MOST = 5
"""The most changes that one message lists."""


@dataclass(frozen=True)
class ContractChange:
    """A declaration that differs between two contracts. `parts` has the changes, such as "ttl was 1 day, is 2 days".

    `kind` is, for example, "view". `outcome` is "new", "gone", "changed", or "renamed" for the project.
    """

    kind: str
    name: str
    outcome: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}{':' if self.outcome == 'changed' else ''} {'; '.join(self.parts)}"


@dataclass(frozen=True)
class ServiceChange:
    """The effect of a contract change on the models of one service. `because` has the differences in words.

    `outcome` is "same" if existing models keep running, "changed" if they do not, "new" or "gone" for the service.
    """

    service: str
    outcome: str
    because: tuple[str, ...]


def changes(old: Contract, new: Contract) -> list[ContractChange]:
    result = []
    if old.project != new.project:
        result.append(ContractChange("project", old.project, "renamed", (f"is now {new.project}",)))
    before, after = old.as_dict(), new.as_dict()
    reread = {name for name, source in old.sources.items() if new.sources.get(name, source) != source}
    # A contract has no entry for a kind that it has no declarations of.
    for kind in (kind for kind, value in {**before, **after}.items() if isinstance(value, Mapping)):
        was, now = before.get(kind, {}), after.get(kind, {})
        for name in sorted({*was, *now}):
            if name not in now:
                result.append(ContractChange(kind[:-1], name, "gone", ("is gone",)))
            elif name not in was:
                result.append(ContractChange(kind[:-1], name, "new", ("is new",)))
            elif was[name] != now[name]:
                result.append(ContractChange(kind[:-1], name, "changed", _parts(was[name], now[name], reread)))
    return result


def differences(old: Contract, new: Contract) -> list[str]:
    return [str(change) for change in changes(old, new)]


def changed_parts(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [part for part in dict.fromkeys((*after, *before)) if before.get(part) != after.get(part)]


def rebuild_reasons(before: ViewContract, after: ViewContract) -> list[str]:
    """Return the names of a view's changed settings that require computing its table again.

    Return [] if the stored rows stay correct. A new `ttl`, for example, only affects reading.
    """
    columns = [[(column.name, column.dtype, column.size) for column in view.fields] for view in (before, after)]
    unstored = {"ttl", "entities", "lookback", *(["fields"] if columns[0] == columns[1] else [])}
    return [part for part in changed_parts(before.as_dict(), after.as_dict()) if part not in unstored]


def service_differences(old: Contract, new: Contract, service: str) -> list[str]:
    """Describe each contract change after which the models of a service need to be made again.

    Return [] if models that were made for the contract `old` also run under the contract `new`. Adding or removing the
    service counts as a change. Raise RequestError if neither contract has the service.
    """
    before, after = old.services.get(service), new.services.get(service) or old.service(service)
    # The name of the project is part of the key of every online row.
    if before is not None and service in new.services and (before.hash, old.project) == (after.hash, new.project):
        return []
    contracts = [contract for contract in (old, new) if service in contract.services]
    views = {view for contract in contracts for view, _ in contract.stored_features(service)}
    definitions = [contract.views[view] for contract in (old, new) for view in views if view in contract.views]
    relevant = {("service", service), ("project", old.project)}
    relevant |= {("view", view) for view in views}
    relevant |= {
        ("transform", transform.name) for contract in contracts for transform in contract.transforms_of(service)
    }
    relevant |= {("source", source) for view in definitions for source in view.sources}
    every = changes(old, new)
    # If none of these declarations differs, the service depends on something else: list all changes.
    return [str(change) for change in [c for c in every if (c.kind, c.name) in relevant] or every]


def view_differences(old: ViewContract, new: ViewContract) -> str:
    return "; ".join(_parts(old.as_dict(), new.as_dict(), set()))


def service_changes(old: Contract, new: Contract) -> list[ServiceChange]:
    result = []
    for name in sorted({*old.services, *new.services}):
        because = tuple(service_differences(old, new, name))
        outcome = "new" if name not in old.services else "gone" if name not in new.services else "changed"
        result.append(ServiceChange(name, outcome if because else "same", because))
    return result


def require_service(where: str, old: Contract, new: Contract, service: str) -> None:
    """Check that a service's models from the contract `old` run under the contract `new`, before serving one.

    Raise ContractMismatch with the changes if they do not run, and RequestError if neither contract has the service.
    `where` begins the message, for example "model delays".
    """
    if because := service_differences(old, new, service):
        raise ContractMismatch(
            where, f"its service has changed since the package was exported ({summary(because)})",
            expected=f"service {service} as in contract {old.hash[:12]}",
            remedy="make the model again, from `isthmus features training-set` to `isthmus deploy`, or undo the change",
        )  # fmt: skip


def summary(lines: Sequence[str]) -> str:
    more = len(lines) - _MOST
    return "; ".join(lines[:_MOST]) + (f"; and {more} more" if more > 0 else "")


def duration_text(micros: int | None) -> str:
    if micros is None:
        return "unlimited"
    words = []
    for unit, size in _UNITS:
        count, micros = divmod(micros, size)
        if count:
            words.append(f"{count:,} {unit}" + ("s" if count > 1 else ""))
    if micros:
        words.append(f"{micros:,} µs")
    return " ".join(words) or "none"


def _parts(before: Mapping[str, Any], after: Mapping[str, Any], reread: set[str]) -> tuple[str, ...]:
    words: list[str] = []
    for part in changed_parts(before, after):
        was, now = (form.get(part, _LEFT_OUT.get(part)) for form in (before, after))
        if part in _COLUMNS:
            noun = _COLUMNS[part]
            words += _columns(noun, _by_name(part, was), _by_name(part, now)) or [f"its {noun}s changed"]
        elif part == "label":
            words.append(_was(part, " ".join, was, now))
        elif part in _TIMES:
            words.append(_was(part, duration_text, was, now))
        elif part == "rules":
            old, new = ({name: str(FieldRule(*rule)) for name, *rule in rules or ()} for rules in (was, now))
            words += [f"the rule for {name} was ({old.get(name, 'none')}), is ({new.get(name, 'none')})"
                      for name in changed_parts(new, old)]  # fmt: skip
        elif part == "graph":
            words.append("its computation changed")
        elif part == "code":
            # The digest covers both without distinguishing them.
            read = reread & {*before.get("sources", ()), *after.get("sources", ())}
            words.append("its code changed, or how its sources are read" if read else "its code changed")
        else:
            past, present = ("were", "are") if isinstance(was, list) else ("was", "is")
            words.append(f"{part.replace('_', ' ')} {past} {_text(was)}, {present} {_text(now)}")
    return tuple(words)


def _by_name(part: str, items: Sequence[Sequence[Any]] | None) -> dict[str, list[Any]]:
    if part in _PAIRS:
        return {".".join(item): [] for item in items or ()}
    return {name: more for name, *more in items or ()}


def _columns(noun: str, before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> list[str]:
    words = [f"{noun} {name} is gone" for name in before if name not in after]
    for name, parts in after.items():
        if name not in before:
            words.append(f"{noun} {name} is new")
            continue
        (was, size), (now, new_size) = _sized(before[name]), _sized(parts)
        pairs = zip(was, now, strict=False)
        words += [_was(f"{noun} {name}", _available, earlier, later) for earlier, later in pairs if earlier != later]
        if size != new_size:
            words.append(_was(f"the size of {noun} {name}", str, size or "any", new_size or "any"))
    reordered = [name for name in before if name in after] != [name for name in after if name in before]
    return [*words, f"the order of its {noun}s changed"] if reordered else words


def _sized(parts: Sequence[Any]) -> tuple[list[str], int | None]:
    return (list(parts[:-1]), parts[-1]) if parts and isinstance(parts[-1], int) else (list(parts), None)


def _available(value: str) -> str:
    return AVAILABLE.get(value, value)


def _was(subject: str, words: Callable[[Any], str], before: Any, after: Any) -> str:
    return f"{subject} was {words(before)}, is {words(after)}"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return value if isinstance(value, str) and _PLAIN.match(value) else json.dumps(value)
