"""Command list of `--help`: grouped, with untruncated sentences."""

from typing import TYPE_CHECKING

from typer.core import TyperGroup

if TYPE_CHECKING:
    import click

GROUPS = {
    "Commands": (
        "init", "audit", "status", "dev", "apply", "build", "materialize", "stream", "distill", "verify", "serve",
        "maintain",
    ),
    "Groups": ("features", "pushes", "model", "package", "deploy", "answers", "infra", "keys", "contract"),
}  # fmt: skip

WIDTH = 120  # maximum line length of help texts
_WHOLE = 1000  # characters of a short help text; click truncates at its default instead of wrapping


class CommandGroup(TyperGroup):
    """Lists the commands of `isthmus` under the titles of `GROUPS`, and those of a group under one title."""

    def format_commands(self, ctx: "click.Context", formatter: "click.HelpFormatter") -> None:
        width = max(map(len, self.commands))
        for title, names in (GROUPS if ctx.parent is None else {"Commands": tuple(self.commands)}).items():
            with formatter.section(title):
                # Pad the names so that sentences start at the same column in every group.
                formatter.write_dl(
                    [(name.ljust(width), self.commands[name].get_short_help_str(_WHOLE)) for name in names]
                )
