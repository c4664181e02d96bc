"""Sentences about a report: the teacher's gain, warnings and limits."""

from isthmus.distill.reports.report import UNLABELED, ModelRecord, Report
from isthmus.distill.reports.words import between, measure, number, share


def teacher_gain(report: Report) -> list[str]:
    sentences = []
    gap, gain = report.gap_closed, report.taught
    if gap is not None and gap.value is not None:
        bounds = "" if gap.low is None or gap.high is None else f" ({share(gap.low)} to {share(gap.high)})"
        sentences.append(
            f"The student closes {share(gap.value)}{bounds} of the gap between control and teacher in {report.metric}."
        )
    if gain is not None and gain.value is not None:
        bounds = between(gain.low, gain.high)
        gained = f"The teacher improves the student's {report.metric} by {measure(gain.value)}"
        sentences.append(gained + (f" ({bounds})" if bounds else "") + ", compared with training without it.")
    return sentences


def early_stops(report: Report) -> list[str]:
    stops = [
        f"{run.model} of seed {run.seed} at step {number(run.steps)} of {number(run.planned)}"
        for run in report.runs
        if run.steps and run.planned and run.steps < run.planned
    ]
    return [f"Training stopped early, without gain on the validation part: {', '.join(stops)}."] if stops else []


def warnings(report: Report) -> list[str]:
    if (lift := report.measures.get("lift_kept")) is None or lift > 0:
        return []
    reached = measure(report.models["student"].quality[report.metric])
    steps = next(run.steps for run in report.runs if run.model == "student")
    sentence = f"The student is no better than chance: its {report.metric} is {reached} after {number(steps)} steps."
    return [f"{sentence} Train it longer with settings=Settings(epochs=...) in its Distillation, or on more rows."]


def limits(report: Report) -> list[str]:
    sentences = warnings(report) + [
        f"Gate {gate.metric} failed: its value is {measure(gate.found)}." for gate in report.gates if not gate.holds
    ]
    if unlabeled := report.rows.get(UNLABELED):
        sentences.append(
            f"{number(unlabeled)} of the {number(report.rows['train'])} training rows have no label: the student "
            "learned them from the teacher alone, and the control did not see them."
        )
    student, teacher = (report.models.get(name, ModelRecord()).parameters for name in ("student", "teacher"))
    if student is not None and teacher is not None and student >= teacher:
        sentences.append(
            f"The student is not smaller than its teacher: {number(student)} and {number(teacher)} weights."
        )
    if len(report.seeds) == 1:
        sentences.append("Only one seed was trained, so the variation between seeds is unknown.")
    gain = report.taught
    if gain is not None and gain.low is not None and gain.high is not None and gain.low <= 0 <= gain.high:
        sentences.append(
            f"The interval of student - control contains 0: a gain in {report.metric} from the teacher is not proven."
        )
    agreement = report.agreement.get("student", {}).get("agreement")
    if agreement is not None and agreement < 1:
        sentences.append(f"On {share(1 - agreement)} of the test rows, student and teacher predict different classes.")
    if report.slices:
        worst = report.slices[0]
        value = "has no value" if worst.value is None else f'is "{worst.value}"'
        sentences.append(
            f"The student loses most against the teacher where {worst.column} {value}: {report.metric} "
            f"{measure(worst.student)} instead of {measure(worst.teacher)}, on {number(worst.rows)} rows."
        )
    else:
        sentences.append("Slices of the test rows have not been measured.")
    if report.boundaries:
        sentences.append(f"The test rows begin at {report.boundaries[-1]}; quality at other times is unknown.")
    if report.serving is None:
        return [*sentences, "The serving cost has not been measured yet."]
    if report.serving.host:
        sentences.append(f"Latencies were measured on a host ({report.serving.host}), not on a device.")
    return [*sentences, *(f"The package has no {name}: {why}" for name, why in report.serving.left_out.items())]
