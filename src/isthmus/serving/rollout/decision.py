"""Files in which a server notes that a model on trial failed. Other workers and `isthmus` read them without a lock."""

from pathlib import Path

import msgspec

from isthmus.features.errors import PackageError
from isthmus.serving.deployment.record import Deployment


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server's decision that a model on trial failed, with the reason. Times are microseconds since 1970 UTC."""

    digest: str
    deployed_at: int
    at: int
    why: str

    def matches(self, deployment: Deployment) -> bool:
        return (self.digest, self.deployed_at) == (deployment.digest, deployment.deployed_at)

    def dumps(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str) -> "Decision":
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PackageError(where, f"is not a decision ({error})", remedy="remove the file") from error


def decision_file(file: Path) -> Path:
    return file.with_name("candidate.refused.json")


def read_decision(file: Path, deployment: Deployment) -> Decision | None:
    file = decision_file(file)
    try:
        decision = Decision.loads(file.read_bytes(), str(file))
    except (OSError, PackageError):
        return None
    return decision if decision.matches(deployment) else None
