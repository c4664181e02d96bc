"""What a report says in sentences: of what the teacher gave, and of what is not known or not good."""

from isthmus.distill.reports.report import Estimate, Report
from isthmus.distill.reports.words import between, measure, number, share


def gained(report: Report) -> list[str]:
    """What the teacher gave the student."""
    found = []
    gap, taught = report.gap_closed, report.taught
    if gap is not None and gap.value is not None:
        bounds = "" if gap.low is None or gap.high is None else f" ({share(gap.low)} to {share(gap.high)})"
        found.append(
            f"{share(gap.value)}{bounds} of the gap between control and teacher is closed, in {report.metric}."
        )
    if taught is not None and taught.value is not None:
        bounds = between(taught.low, taught.high)
        told = f"The teacher is worth {measure(taught.value)} {report.metric} to the student"
        found.append(told + (f" ({bounds})" if bounds else "") + ", against the same student without it.")
    return found


def limits(report: Report) -> list[str]:
    """What is known not to hold, and what has not been measured."""
    found = [
        f"The gate of {gate.metric} does not hold: {measure(gate.found)} was found."
        for gate in report.gates
        if not gate.holds
    ]
    if len(report.seeds) == 1:
        found.append("One seed was trained: how much another would differ is not known.")
    if _holds_zero(report.taught):
        found.append(f"The interval of student - control holds 0: no gain in {report.metric} by the teacher is shown.")
    like = report.agreement.get("student", {}).get("agreement")
    if like is not None and like < 1:
        found.append(f"On {share(1 - like)} of the test rows the student's class is not the teacher's.")
    if report.slices:
        worst = report.slices[0]
        value = "has no value" if worst.value is None else f'is "{worst.value}"'
        found.append(
            f"Worst against the teacher where {worst.column} {value}: {report.metric} {measure(worst.student)}, the "
            f"teacher's {measure(worst.teacher)}, on {number(worst.rows)} rows."
        )
    else:
        found.append("Slices of the test rows have not been measured.")
    if report.boundaries:
        found.append(f"It was tested on rows from {report.boundaries[-1]} on; of other times nothing is known.")
    if report.serving is None:
        found.append("What an answer costs in its runtime has not been measured yet.")
    elif report.serving.host:
        found.append(f"Latencies are those of a host ({report.serving.host}), not of a device.")
    return found


def _holds_zero(estimate: Estimate | None) -> bool:
    return estimate is not None and estimate.low is not None and estimate.high is not None and (
        estimate.low <= 0 <= estimate.high
    )  # fmt: skip
