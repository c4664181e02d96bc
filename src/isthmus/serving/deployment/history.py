"""The history of a deployment file: what was deployed when, under which contract, and why."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from isthmus.features.files import Journal
from isthmus.serving.deployment.record import Deployment

Action = Literal["deploy", "promote", "rollback", "shadow", "canary", "drop", "refuse"]
"""The first three change the deployed package; the last four concern a candidate."""


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    at: int
    action: Action
    deployment: Deployment
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        deployment = self.deployment
        return {
            "at": self.at, "action": self.action, "model": deployment.model, "digest": deployment.digest,
            "contract": deployment.contract, "precision": deployment.precision, "why": self.why,
        }  # fmt: skip


class DeploymentHistory(Journal[Event]):
    """The history `deployments.jsonl` next to the file `deployment`; `locked` also guards changes of that file."""

    def __init__(self, deployment: Path) -> None:
        super().__init__(
            deployment.with_name("deployments.jsonl"), Event,
            busy=("another deployment is in progress here", "wait until it has finished"),
            remedy="remove that line: the current deployment is in another file",
        )  # fmt: skip

    def add(self, record: Event) -> None:
        super().add(msgspec.structs.replace(record, deployment=record.deployment.relative(self._file)))

    def _records(self, lines: bytes) -> list[Event]:
        return [
            msgspec.structs.replace(event, deployment=event.deployment.absolute(self._file))
            for event in super()._records(lines)
        ]


def deployment_chain(events: Sequence[Event]) -> list[Deployment]:
    """Return the deployments that a rollback steps back through, oldest first. The last one is the current one.

    `events` is the history of a project's deployments, oldest first. Deployments that were rolled back are omitted. A
    deployment of the same package, precision and threads as the one before replaces it.
    """
    deployments: list[Deployment] = []
    for event in events:
        if event.action not in ("deploy", "promote", "rollback"):
            continue
        places = [
            n for n, deployment in enumerate(deployments) if deployment.runtime_key == event.deployment.runtime_key
        ]
        if event.action == "rollback" and places:
            del deployments[places[-1] :]
        elif deployments and deployments[-1].runtime_key == event.deployment.runtime_key:
            deployments.pop()
        deployments.append(event.deployment)
    return deployments
