"""The result of an audit: counts by view and feature, findings with causes, and examples to check with Feast's SDK."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from isthmus.features.audit.causes import CAUSES, mend
from isthmus.features.errors import DependencyError, GateFailed

KINDS = (
    "differing", "missing online", "stale", "expired but served", "rounded", "lost by the join", "wrong in the join",
    "tie",
)  # fmt: skip
"""Kinds of findings that are counted per feature. Audits count "differing" values themselves."""


@dataclass(frozen=True)
class Example:
    """A row with a difference: its values in the source and the store, and in `check` a line of Python to read it."""

    key: dict[str, Any]
    feature: str
    source: Any
    source_time: str
    online: Any
    online_time: str
    check: str


@dataclass(frozen=True)
class AuditFinding:
    """Differences of one kind with one cause.

    Attributes:
        kind: the symptom, such as "stale".
        cause: its explanation, a key of `CAUSES`.
        count: number of keys online, of source rows, or of rows of a join.
        features: number of these rows with a difference, by feature.
    """

    kind: str
    cause: str
    count: int
    features: dict[str, int]
    examples: list[Example]
    note: str = ""


@dataclass
class ViewReport:
    """The audit of a view.

    Attributes:
        rows: number of source rows.
        keys: number of keys up to the time of the audit.
        compared: number of values that were compared with the online store.
        rows_in: number of entity rows given to the offline store's join.
        rows_out: number of rows that the join returned.
        features: counts by feature and kind.
        errors: reasons why something could not be compared.
    """

    name: str
    rows: int = 0
    keys: int = 0
    compared: int = 0
    rows_in: int = 0
    rows_out: int = 0
    seconds: float = 0.0
    features: dict[str, dict[str, int]] = field(default_factory=dict)
    findings: list[AuditFinding] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, finding: AuditFinding) -> None:
        self.findings.append(finding)
        for name, count in finding.features.items() if finding.kind in KINDS[1:] else ():
            counts = self.features[name]
            counts[finding.kind] = counts.get(finding.kind, 0) + count


@dataclass(frozen=True)
class AuditReport:
    """The audit of a repository. `mend` has the lines of `feature_store.yaml` that fix some of the findings."""

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
    def findings(self) -> Iterator[tuple[ViewReport, AuditFinding]]:
        return ((view, finding) for view in self.views for finding in view.findings)

    @property
    def errors(self) -> list[str]:
        none = ["the repository has no view with a source that can be read"]
        return [error for view in self.views for error in view.errors] if self.views else none

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
            causes = ", ".join(dict.fromkeys(findings))
            raise GateFailed("audit", f"{found}: {causes}", remedy="see the report for examples and remedies")
        if self.errors:
            raise DependencyError("audit", f"not everything could be compared: {self.errors[0]}",
                                  remedy="fix this, then run the audit again")  # fmt: skip
