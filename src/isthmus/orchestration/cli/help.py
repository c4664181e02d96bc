"""Command list of `--help`: grouped, with untruncated sentences."""

from typing import TYPE_CHECKING

from typer.core import TyperGroup

if TYPE_CHECKING:
    import click

GROUPS = {
    "Project": ("init", "status", "dev", "demo"),
    "Features": ("apply", "build", "materialize", "collect", "snapshot", "lookup", "quality", "training-set"),
    "Models": ("distill", "search", "export", "ladder", "attribute", "explain", "monitor", "plan", "page"),
    "Releases and servers": ("verify", "deploy", "rollback", "history", "serve", "recorded", "replay", "fleet"),
    "Keys, contracts and packages": ("keys", "contract", "package"),
}

WIDTH = 120  # maximum line length of help texts
_WHOLE = 1000  # characters of a short help text; click truncates at its default instead of wrapping


class CommandGroup(TyperGroup):
    """Lists the verbs of `isthmus` under the titles of `GROUPS`, and the verbs of a subgroup under one title."""

    def format_commands(self, ctx: "click.Context", formatter: "click.HelpFormatter") -> None:
        width = max(map(len, self.commands))
        for title, names in (GROUPS if ctx.parent is None else {"Commands": tuple(self.commands)}).items():
            with formatter.section(title):
                # Pad the names so that sentences start at the same column in every group.
                formatter.write_dl(
                    [(name.ljust(width), self.commands[name].get_short_help_str(_WHOLE)) for name in names]
                )
