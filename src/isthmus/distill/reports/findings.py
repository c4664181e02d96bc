"""Sentences about a report: what the teacher added, and what is not known or not good."""

from isthmus.distill.reports.report import Report
from isthmus.distill.reports.words import between, measure, number, share


def teacher_gain(report: Report) -> list[str]:
    """What the teacher added to the student."""
    sentences = []
    gap, gain = report.gap_closed, report.taught
    if gap is not None and gap.value is not None:
        bounds = "" if gap.low is None or gap.high is None else f" ({share(gap.low)} to {share(gap.high)})"
        sentences.append(
            f"{share(gap.value)}{bounds} of the gap between control and teacher is closed, in {report.metric}."
        )
    if gain is not None and gain.value is not None:
        bounds = between(gain.low, gain.high)
        worth = f"The teacher is worth {measure(gain.value)} {report.metric} to the student"
        sentences.append(worth + (f" ({bounds})" if bounds else "") + ", against the same student without it.")
    return sentences


def warnings(report: Report) -> list[str]:
    """Return a warning if the student is no better than a model without inputs."""
    if (lift := report.measures.get("lift_kept")) is None or lift > 0:
        return []
    reached = measure(report.models["student"].quality[report.metric])
    steps = next(run.steps for run in report.runs if run.model == "student")
    sentence = f"The student is no better than chance: its {report.metric} is {reached} after {number(steps)} steps."
    return [f"{sentence} Train it longer, settings=Settings(epochs=...) in its Distillation, or on more rows."]


def limits(report: Report) -> list[str]:
    """What is known not to hold, and what has not been measured."""
    sentences = warnings(report) + [
        f"The gate of {gate.metric} does not hold: it is {measure(gate.found)}."
        for gate in report.gates
        if not gate.holds
    ]
    if len(report.seeds) == 1:
        sentences.append("One seed was trained: how much another would differ is not known.")
    gain = report.taught
    if gain is not None and gain.low is not None and gain.high is not None and gain.low <= 0 <= gain.high:
        sentences.append(
            f"The interval of student - control contains 0: no gain in {report.metric} by the teacher is shown."
        )
    agreement = report.agreement.get("student", {}).get("agreement")
    if agreement is not None and agreement < 1:
        sentences.append(f"On {share(1 - agreement)} of the test rows the student's class is not the teacher's.")
    if report.slices:
        worst = report.slices[0]
        value = "has no value" if worst.value is None else f'is "{worst.value}"'
        sentences.append(
            f"Worst against the teacher where {worst.column} {value}: {report.metric} {measure(worst.student)}, the "
            f"teacher's {measure(worst.teacher)}, on {number(worst.rows)} rows."
        )
    else:
        sentences.append("Slices of the test rows have not been measured.")
    if report.boundaries:
        sentences.append(f"It was tested on rows from {report.boundaries[-1]} on; of other times nothing is known.")
    if report.serving is None:
        sentences.append("What an answer costs in its runtime has not been measured yet.")
    elif report.serving.host:
        sentences.append(f"Latencies are those of a host ({report.serving.host}), not of a device.")
    return sentences
