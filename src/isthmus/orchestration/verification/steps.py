"""Step that compares the values of a package with the stores, the API and the devices."""

from isthmus.features.document.blocks import TableBlock
from isthmus.orchestration.steps.step import Results, Step, Work, markdown, plots

_DIFFERS = ("", "differing", "compared", "worst", "tolerance", "first key", "event time", "offline", "online")


def _verify(work: Work) -> Results:
    from isthmus.orchestration.artifacts import page_file
    from isthmus.orchestration.verification import page
    from isthmus.orchestration.verification.verify import verify

    verdict = verify(work.project, work.name, all_keys=True, progress=work.progress)
    metadata = work.metadata(verdict.as_dict())
    metadata["parity"] = plots(page.images(verdict))
    metadata["page"] = {"raw_value": str(page_file(work.project, work.name)), "type": "path"}
    rows = []
    for name, feature in verdict.named().items():
        if feature.differing:
            sides = ["-"] * 4
            if feature.examples:
                first = feature.examples[0]
                sides = [first.key, first.event_timestamp or "-", repr(first.offline), repr(first.online)]
            counts = [f"{feature.differing:,}", f"{feature.compared:,}"]
            rows.append([name, *counts, f"{feature.worst:.6g}", f"{feature.tolerance:g}", *sides])
    if rows:
        metadata["differs"] = markdown(TableBlock(_DIFFERS, rows))
    if verdict.limits:
        metadata["limits"] = "; ".join(verdict.limits)
    if verdict.runtimes:
        metadata["runtimes"] = markdown(page.runtimes_table(verdict))
    yield "" if verdict.passed else f"{verdict.differing:,} of {verdict.compared:,} values differ", metadata


STEPS = (
    Step(
        "verify", "serve", _verify, checked=("package",), waits_for=("online", "snapshot"), changes_status=True,
        checks={"verdict": "Offline, online, request-time and package values agree."},
    ),
)  # fmt: skip
