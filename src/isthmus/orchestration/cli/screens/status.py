"""Where a project stands, on one screen."""

from rich.markup import escape

from isthmus.features import clock
from isthmus.features.status import ModelStatus, Status, ViewStatus
from isthmus.orchestration.cli.screens.terminal import new_console, new_table

_BAD, _GOOD = "[red]{}[/]", "[green]{}[/]"


def show_status(status: Status) -> None:
    """Prints it: a line per view, per model and per run, and below each table what is the matter."""
    console = new_console()
    force = "in force" if status.applied else "[red]not in force, run `isthmus apply`[/]"
    console.print(
        f"{escape(status.project)}, contract {status.contract[:12]}, {force}; it is {_time(status.now)}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    views = new_table("view", "rows", "last day", "built", "readable online", "state")
    for name, view in status.views.items():
        rows = "-" if view.rows is None else f"{view.rows:,}"
        views.add_row(
            escape(name), rows, _aged(view), _time(view.built_at), _time(view.served_at), _state(view, status.applied)
        )
    views.columns[-1].justify = "left"
    # Where there is too little room, names stay whole.
    views.columns[0].min_width = max(map(len, status.views), default=0)
    console.print(views)
    for name, view in status.views.items():
        for sentence in (view.problem, *view.broken, *view.drifted):
            if sentence:
                console.print(f"  [red]{escape(name)}[/]: {escape(sentence)}", highlight=False, soft_wrap=True)
    if status.models:
        models = new_table("model", "training set", "student", "package", "verdict", "deployed", words=True)
        models.columns[0].min_width = max(map(len, status.models))
        for name, model in status.models.items():
            made = (_short(one) for one in (model.training_set, model.student, model.package))
            models.add_row(escape(name), *made, _verdict(model), _deployed(model))
        console.print(models)
        for name, model in status.models.items():
            for sentence in model.stale:
                console.print(f"  [red]{escape(name)}[/]: {escape(sentence)}", highlight=False, soft_wrap=True)
    if status.runs:
        runs = new_table("run", "began", "ended with", "made", words=True)
        for run in status.runs:
            word = {"success": _GOOD, "failure": _BAD}.get(run.status, "{}").format(run.status)
            runs.add_row(run.id[:8], _time(run.at), word, escape(run.made))
        console.print(runs)


def _aged(view: ViewStatus) -> str:
    if view.last_day is None:
        return "-"
    if view.timeless:
        return "no times"
    days = "today" if view.age_days == 0 else f"{view.age_days} day{'' if view.age_days == 1 else 's'} ago"
    return f"{view.last_day}, {days}"


def _state(view: ViewStatus, applied: bool) -> str:
    wrong = view.wrong(applied=applied)
    return _BAD.format(", ".join(wrong)) if wrong else _GOOD.format("up to date")


def _verdict(model: ModelStatus) -> str:
    if model.verdict is None:
        return "none" if model.package else "-"
    word = _GOOD.format("passed") if model.verdict else _BAD.format("failed")
    return f"{word}, {model.compared:,} values"


def _deployed(model: ModelStatus) -> str:
    if model.deployed is None:
        return "-"
    since = _time(model.deployed_at)
    return since if model.deployed == model.package else f"not the last: {_short(model.deployed)} {since}"


def _short(identity: str | None) -> str:
    return "-" if identity is None else identity[:12]


def _time(at: int | None) -> str:
    return "-" if at is None else clock.moment(at).strftime("%Y-%m-%d %H:%M")
