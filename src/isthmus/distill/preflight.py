"""Checks with an untrained student before training, to find errors that would otherwise appear only at the end."""

from collections.abc import Callable, Collection

import torch
from torch import nn

from isthmus.distill.accelerator import enough_memory, is_full
from isthmus.distill.losses.objective import Objective
from isthmus.distill.onnx.runtime import predict, session, tensor_info
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.runtimes.conversions import conversions_for
from isthmus.distill.runtimes.network import portable_part, run_program
from isthmus.distill.settings import TrainingSettings
from isthmus.distill.tasks.answers import require_steady, student_answers
from isthmus.distill.tasks.graph import student_graph
from isthmus.distill.tasks.task import Task
from isthmus.distill.teachers.compatibility import compatible, differing_tokens
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.training.groups import group_problems
from isthmus.distill.training.parts import losses
from isthmus.distill.training.studentrun import TeacherBatches, first_parts
from isthmus.distill.training.studentstep import StudentStep
from isthmus.distill.training.teacheroutputs import announce_calls
from isthmus.features.errors import ConfigurationError, DataError, GateFailed, Problem, one_of
from isthmus.package.featurizer.form import HEAD

STEADY = 4
"""Number of rows on which a student must give the same output twice."""

_MEASURED = ("parameters", "bytes", "p50_us", "p99_us")


def rehearse(
    task: Task, teacher: Teacher, outputs: OutputCache, settings: TrainingSettings, note: Callable[[str], None]
) -> None:
    """Try each step of a distillation with an untrained student, to find errors before hours of computation.

    Called before the teacher computes its outputs. Computes the loss and its gradient for the first batch. Runs the
    student's graph in ONNX Runtime, and in a child process for each other declared runtime. If `outputs` lacks outputs
    of the teacher, calls the teacher on two rows, and on the first batch if the objective uses the teacher. Leaves
    torch's random state on the CPU unchanged. Calls `note` with a line of text for each remark, such as a runtime that
    cannot run the student.

    Raises:
        ConfigurationError: gates, settings, row groups, student, teacher and objective do not fit each other, or the
            student's outputs are random in eval mode.
        DataError: an input reveals the label on its own, or an output of the teacher is unusable.
        GateFailed: the loss is not finite.
        DependencyError: memory is full.
    """
    declared = task.material.declaration
    where = declared.where
    if problems := declared.gate_problems(task.measured):
        raise ConfigurationError(where, problems)
    groups = task.groups(task.material.parts.train)
    whole = not task.separable
    if groups is not None and (problems := group_problems(torch.from_numpy(groups), settings, 1, where, whole=whole)):
        raise ConfigurationError(where, problems)
    with torch.random.fork_rng(devices=[]):
        student, objective = task.student(), task.objective()
    steps = settings.total(len(task.material.parts.train))
    objective.require_weight(steps, f"{where}: student")
    if (alone := objective.without_teacher()) is not None:
        alone.require_weight(steps, f"{where}: control")
    else:
        note(f"no control is trained: every term of the objective needs the teacher ({', '.join(objective.terms)})")
    if leaks := task.leaks():
        raise DataError(
            f"{where}: inputs",
            "; ".join(leaks),
            expected="inputs that are known before the label and do not reveal it on their own",
            remedy="remove inputs that are known only after the label; if they are known before, you need no model",
        )
    train = task.material.parts.train
    probed = announce_calls(teacher, outputs, train[: len(first_parts(task, settings, len(train)).rows)], note)
    _first_step(task, student, objective, outputs, settings)
    _require_compatible(task, probed, student, outputs)
    if unlabeled := len(task.material.parts.train) - len(task.labeled(task.material.parts.train)):
        total = len(task.material.parts.train)
        note(f"{unlabeled:,} of {total:,} training rows have no label: they are learned from the teacher alone")
    if outputs.missing and objective.asks_teacher and (size := teacher.size()) is not None:
        weights = sum(each.numel() for each in student.parameters())
        if weights >= size[0]:
            note(f"the student is not smaller than its teacher: {weights:,} and {size[0]:,} weights")
    rows = task.material.parts.validation[:1]
    require_steady(task, student.eval(), task.material.parts.validation[:STEADY])
    model = student_graph(task, student)
    predict(session(model.SerializeToString(), 1), task.feeds(rows))
    if runtimes := conversions_for(declared):
        tensors, results = ([*map(tensor_info, values)] for values in (model.graph.input, model.graph.output))
        of = portable_part(task, student, rows, tensors, results)
        if of.head is not None:
            try:
                of.head()
            except GateFailed as error:
                note(f"the package will have no {HEAD}: {error}")
        for runtime in runtimes:
            convert, *_ = runtime.files(of, task.material.parts.train, ()).values()
            try:
                with run_program(runtime.program, convert(), of.tensors, of.outputs) as run:
                    run(of.feeds(rows))
            except GateFailed as error:
                note(f"the package will have no model for {runtime.program.libraries.runtime}: {error}")


def require_measured(task: Task, outputs: OutputCache, references: Collection[str]) -> None:
    """Check before training that the report will have the task's metric and every figure that a gate names.

    Such a figure is "student.auc". Runs an untrained student on the validation rows. `outputs` must have the teacher's
    outputs for these rows. `references` has the names of the other models in the report. Raise a
    ConfigurationError if a name is unknown.
    """
    where, rows = task.material.declaration.where, task.material.parts.validation
    with torch.random.fork_rng(devices=[]):
        student = task.student().eval()
    theirs = outputs.float32(rows)
    ours = student_answers(task, student, rows, torch.device("cpu"))
    quality = {*task.quality(theirs, rows, theirs), *task.quality(ours, rows, theirs)}
    if task.metric not in quality:
        raise ConfigurationError(f"{where}: metric", [Problem("task", repr(task.metric), one_of(quality))])
    pupils = {*quality, *_MEASURED, *task.agreement(ours, theirs)}
    known = {f"{model}.{figure}" for model in ("teacher", *references) for figure in (*quality, *_MEASURED)}
    known |= {f"{model}.{figure}" for model in ("student", "control") for figure in pupils}
    metrics = [gate.metric for gate in task.material.declaration.required if "." in gate.metric]
    if unknown := [metric for metric in metrics if metric not in known]:
        raise ConfigurationError(where, [Problem("gate", repr(metric), one_of(sorted(known))) for metric in unknown])


def _require_compatible(task: Task, teacher: Teacher, student: nn.Module, outputs: OutputCache) -> None:
    tokenizers = task.tokenizers()
    if outputs.missing:
        few = task.asked(task.material.parts.train[:2])
        compatible(teacher, few, {}, labels=task.classes, student=student, tokenizers=tokenizers)
    # If all outputs are cached they were checked before, so do not load the teacher; only check the tokenizers.
    elif tokenizers is not None and (problems := differing_tokens(*tokenizers)):
        raise ConfigurationError(teacher.where, problems)


def _first_step(
    task: Task, student: nn.Module, objective: Objective, outputs: OutputCache, settings: TrainingSettings
) -> None:
    where, train, cpu = task.material.declaration.where, task.material.parts.train, torch.device("cpu")
    parts, step = first_parts(task, settings, len(train)), StudentStep(task, student, objective)
    rows = len(parts.rows)
    place = f"{where}: the first {rows:,} rows"
    remedy = "correct the objective, the student or the teacher; so far only outputs for these rows were computed"
    with torch.random.fork_rng(devices=[]), enough_memory(place, cpu, settings, rows):
        data = TeacherBatches(task, train[:rows], outputs, cpu, with_teacher=objective.asks_teacher)
        try:
            step.check(student, data, parts)
            for loss, _ in losses(step, student, data, parts, 0.5):
                loss.backward()  # type: ignore[no-untyped-call]
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{place}: {error.where}", error.problems, remedy=error.remedy or remedy
            ) from error
        except GateFailed as error:
            raise GateFailed(
                f"{place}: {error.where}", error.found, expected=error.expected,
                remedy="check the labels, the inputs and the teacher's outputs of these rows",
            ) from error  # fmt: skip
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # from torch or the task
            if is_full(error):
                raise
            problem = Problem("student and loss", f"raise {type(error).__name__}: {error}".rstrip("."))
            raise ConfigurationError(place, [problem], remedy=remedy) from error
