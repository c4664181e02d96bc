"""The result of an audit: what was compared, what differs and why, and examples to check with Feast's SDK."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from isthmus.features.audit.causes import CAUSES, mend
from isthmus.features.errors import DependencyError, GateFailed

KINDS = ("differing", "missing online", "stale", "expired but served", "rounded", "lost by the join", "tie")
"""The counts per feature."""


@dataclass(frozen=True)
class Example:
    """One row to check: what the source and the store have, and a line of Feast's SDK that shows it."""

    key: dict[str, Any]
    feature: str
    source: Any
    source_time: str
    online: Any
    online_time: str
    check: str


@dataclass(frozen=True)
class Finding:
    """Differences of one kind with one cause. `count` is a number of keys, or of rows of the source or the join."""

    kind: str
    cause: str
    count: int
    features: dict[str, int]
    examples: list[Example]
    note: str = ""


@dataclass
class ViewReport:
    """The audit of a view. `errors` say what could not be compared. `rows_in` and `rows_out` are of the join."""

    name: str
    rows: int = 0
    keys: int = 0
    compared: int = 0
    rows_in: int = 0
    rows_out: int = 0
    seconds: float = 0.0
    features: dict[str, dict[str, int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        for name, count in finding.features.items() if finding.kind in KINDS[1:] else ():
            counts = self.features[name]
            counts[finding.kind] = counts.get(finding.kind, 0) + count


@dataclass(frozen=True)
class Report:
    """The audit of a repository, with the settings for Feast that mend what our classes mend."""

    repository: str
    project: str
    online_store: str
    offline_store: str
    at: str
    sample: int | None
    seconds: float
    notes: list[str]
    views: list[ViewReport]

    @property
    def findings(self) -> Iterator[tuple[ViewReport, Finding]]:
        return ((view, finding) for view in self.views for finding in view.findings)

    @property
    def errors(self) -> list[str]:
        return [error for view in self.views for error in view.errors]

    @property
    def passed(self) -> bool:
        return not [*self.findings] and not self.errors

    @property
    def mend(self) -> str:
        lost = any("the join" in finding.kind for _, finding in self.findings)
        return mend((finding.cause for _, finding in self.findings), ["offline_store"] * lost)

    def as_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = {**asdict(self), "passed": self.passed, "mend": self.mend}
        for view in document["views"]:
            for finding in view["findings"]:
                about = CAUSES[finding["cause"]]
                finding.update(meaning=about.meaning, remedy=about.remedy)
        return {**document, "views": {view["name"]: view for view in document["views"]}}

    def require(self) -> None:
        """Raise GateFailed if anything differs, or DependencyError if only something could not be compared."""
        if findings := [finding.cause for _, finding in self.findings]:
            found = f"{len(findings)} finding{'s' * (len(findings) > 1)} in {self.project}"
            raise GateFailed("audit", f"{found}: {', '.join(dict.fromkeys(findings))}")
        if self.errors:
            raise DependencyError("audit", f"not everything could be compared: {self.errors[0]}")
