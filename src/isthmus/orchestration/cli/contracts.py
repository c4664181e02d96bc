"""`isthmus contract`: show a contract, or compare two."""

from functools import partial
from typing import Annotated

import typer

from isthmus.orchestration.cli.options import JsonOption, ProjectOption, local, open_project
from isthmus.orchestration.cli.screens.terminal import present

verbs = typer.Typer(help="Show a contract, or compare two contracts.", no_args_is_help=True, rich_markup_mode=None)
_CONTRACT = "A contract.json, a package folder, a project folder, `applied` or `definitions`"


@verbs.command("show")
def show(
    a: Annotated[str, typer.Argument(**local(_CONTRACT, text=True))] = "applied",
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the views, request transforms, services, sources, spines and hashes of a contract."""
    from isthmus.orchestration.apply.contracts import find
    from isthmus.orchestration.cli.screens.contract import contract_blocks

    contract = find(a, lambda: open_project(project))
    present(contract.as_dict(), partial(contract_blocks, contract), as_json=as_json)


@verbs.command("diff")
def diff(
    a: Annotated[str, typer.Argument(**local(_CONTRACT, text=True))] = "applied",
    b: Annotated[str, typer.Argument(**local("The contract to compare with, given like A", text=True))] = "definitions",
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what changed from A to B, and which services keep working."""
    from isthmus.orchestration.apply.contracts import compare, find
    from isthmus.orchestration.cli.screens.contract import difference_blocks

    difference = compare(*(find(name, lambda: open_project(project)) for name in (a, b)))
    present(difference.as_dict(), partial(difference_blocks, difference), as_json=as_json)
