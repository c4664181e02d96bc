"""The list of commands in `--help`: in groups, and with whole sentences."""

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
"""The commands of `isthmus` by what they are about."""

WIDTH = 120
"""The most characters of a line, on a terminal that is as wide."""

_WHOLE = 1000
"""Characters of a sentence: click cuts what is longer than its line, in place of wrapping it."""


class CommandGroup(TyperGroup):
    """The commands of `isthmus` under the titles of `GROUPS`; those of its command groups under one title."""

    def format_commands(self, ctx: "click.Context", formatter: "click.HelpFormatter") -> None:
        """Writes the list of commands."""
        width = max(map(len, self.commands))
        for title, names in (GROUPS if ctx.parent is None else {"Commands": tuple(self.commands)}).items():
            with formatter.section(title):
                # Padded, so that the sentences begin at the same column in every group.
                formatter.write_dl(
                    [(name.ljust(width), self.commands[name].get_short_help_str(_WHOLE)) for name in names]
                )
