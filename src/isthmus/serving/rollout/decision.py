"""Decisions of a server against a model on trial, for the other workers and for `isthmus`: they wait for no lock."""

from pathlib import Path

import msgspec

from isthmus.features.errors import PackageError
from isthmus.serving.deployment.record import Deployment


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a candidate or a deployment on probation was given up; times are microseconds since 1970 UTC."""

    digest: str
    deployed_at: int
    at: int
    why: str

    def about(self, deployment: Deployment) -> bool:
        """Whether it is about this deployment, and not about an earlier deployment of the package."""
        return (self.digest, self.deployed_at) == (deployment.digest, deployment.deployed_at)

    def dumps(self) -> bytes:
        """The decision as a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str) -> "Decision":
        """The inverse of `dumps`."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PackageError(where, f"is no decision ({error})", remedy="remove the file") from error


def decision_file(file: Path) -> Path:
    """Where the last decision beside a deployment file is."""
    return file.with_name("candidate.refused.json")


def read_decision(file: Path, deployment: Deployment) -> Decision | None:
    """The decision about a deployment, by the deployment file; None if there is none, or it cannot be read."""
    file = decision_file(file)
    try:
        decision = Decision.loads(file.read_bytes(), str(file))
    except (OSError, PackageError):
        return None
    return decision if decision.about(deployment) else None
