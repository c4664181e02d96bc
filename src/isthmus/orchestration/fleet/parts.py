"""What both fleets' manifests have in common."""

from dataclasses import dataclass
from typing import Any

from isthmus.features.profiles import ServingProfile, TrainingProfile

Manifest = dict[str, Any]
"""An object of Kubernetes, as plain data."""

ROOT = "/project"
STATE = f"{ROOT}/.isthmus"
"""Where both fleets have the project's state: a deployment names its package by its path."""

USER = 10001
"""Of every process; no user of the base image has the number."""

DNS = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]

SEALED: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""Security context of a container."""


@dataclass(frozen=True, slots=True)
class Fleets:
    """What the manifests are made from.

    Attributes:
        name: what every object's name begins with.
        version: of Isthmus, which images have as their tag.
        training: how the student is trained.
        serving: how it answers.
        port: where a server listens.
        workers: processes of a server.
        drain_seconds: how long a server that is told to end may still answer.
        server: what a server is told, as JSON whose `$(REDIS_URL)` Kubernetes fills in.
        redis: ports of the online store.
    """

    name: str
    version: str
    training: TrainingProfile
    serving: ServingProfile
    port: int
    workers: int
    drain_seconds: int
    server: str
    redis: tuple[int, ...]

    def image(self, component: str) -> str:
        """An image; overlays say which registry it comes from."""
        return f"{self.name}-{component}:{self.version}"

    def object(self, kind: str, version: str, component: str, **content: Any) -> Manifest:
        """An object of a component."""
        metadata = {"name": f"{self.name}-{component}", "labels": self.labels(component)}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    def labels(self, component: str) -> dict[str, str]:
        """What tells the pods of a component from all others."""
        return {"app.kubernetes.io/name": self.name, "app.kubernetes.io/component": component}

    def claim(self) -> Manifest:
        """The volume of the project's state, which training writes and servers read."""
        return self.object(
            "PersistentVolumeClaim", "v1", "state",
            spec={"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "20Gi"}}},
        )  # fmt: skip

    def state(self, *, read_only: bool) -> Manifest:
        """That volume, in a pod."""
        return {"name": "state",
                "persistentVolumeClaim": {"claimName": f"{self.name}-state", "readOnly": read_only}}  # fmt: skip


def pod(container: Manifest, volumes: list[Manifest], **more: Any) -> Manifest:
    """A pod of one container that may no more than it needs."""
    security = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {
        "automountServiceAccountToken": False,
        # Variables that are named after Services: of a project named isthmus, they would be taken for its settings.
        "enableServiceLinks": False,
        "securityContext": security,
        **more,
        "containers": [container],
        "volumes": volumes,
    }


def kustomization(resources: list[str], **more: Any) -> Manifest:
    """What `kubectl apply -k` reads first in a folder."""
    return {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources, **more}
