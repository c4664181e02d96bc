"""Manifests of the serving fleet, from `[profiles.serving]` and `[server]`."""

from pathlib import Path

from isthmus.orchestration.fleet import probe
from isthmus.orchestration.fleet.parts import DNS, SEALED, STATE, Fleets, Manifest, pod

KEYS = "/etc/isthmus/keys"
COMPONENT = "serving"

WORKER_MB = 192
"""Memory of a worker before it has a model, in MiB: measured, docs/performance.md, and half as much again."""

LEAVE_SECONDS = 5
"""How long a server goes on as before while the fleet learns that it is leaving."""


def manifests(fleets: Fleets) -> dict[str, Manifest]:
    """File name to object."""
    profile, labels = fleets.serving, fleets.labels(COMPONENT)
    selector = {"matchLabels": labels}
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{fleets.name}-{COMPONENT}"}
    busy = {"type": "Utilization", "averageUtilization": round(profile.target_utilization * 100)}
    # No `replicas`: an apply would undo what the autoscaler has chosen.
    deployment = {
        "selector": selector,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"metadata": {"labels": labels}, "spec": _pod(fleets)},
    }
    scaler = {
        "scaleTargetRef": target,
        "minReplicas": profile.replicas_min,
        "maxReplicas": profile.replicas_max,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": busy}}],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    policy = {
        "podSelector": selector,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"ports": [{"protocol": "TCP", "port": "http"}]}],
        "egress": [{"ports": [{"protocol": "TCP", "port": port} for port in fleets.redis]}, {"ports": DNS}],
    }
    service = {"selector": labels, "ports": [{"name": "http", "port": fleets.port, "targetPort": "http"}]}
    # One at a time, also of one: a budget that lets none go would hold up every node's maintenance.
    budget = {"maxUnavailable": 1, "selector": selector}
    return {
        "deployment.yaml": fleets.object("Deployment", "apps/v1", COMPONENT, spec=deployment),
        "service.yaml": fleets.object("Service", "v1", COMPONENT, spec=service),
        "autoscaler.yaml": fleets.object("HorizontalPodAutoscaler", "autoscaling/v2", COMPONENT, spec=scaler),
        "budget.yaml": fleets.object("PodDisruptionBudget", "policy/v1", COMPONENT, spec=budget),
        "network.yaml": fleets.object("NetworkPolicy", "networking.k8s.io/v1", COMPONENT, spec=policy),
    }


def _pod(fleets: Fleets) -> Manifest:
    spread = [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": fleets.labels(COMPONENT)},
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]
    keys = {
        "secretName": f"{fleets.name}-{COMPONENT}",
        "items": [{"key": "keys.json", "path": "keys.json"}],
        "defaultMode": 0o440,
    }
    return pod(
        _container(fleets),
        [
            fleets.state(read_only=True),
            {"name": "keys", "secret": keys},
            {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
        ],
        terminationGracePeriodSeconds=LEAVE_SECONDS + fleets.drain_seconds + 5,
        topologySpreadConstraints=spread,
    )


def _container(fleets: Fleets) -> Manifest:
    profile = fleets.serving
    memory = fleets.workers * (WORKER_MB + profile.memory_mb)
    alive = {"httpGet": {"path": "/healthz", "port": "http"}, "timeoutSeconds": 2}
    ready = ["python", "-IS", "-c", Path(probe.__file__).read_text(encoding="utf-8")]
    return {
        "name": "server",
        "image": fleets.image(COMPONENT),
        "command": ["python", "-m", "isthmus.serving"],
        # A variable stands after those that it is made of.
        "env": [
            _secret(fleets, "REDIS_URL", "redis-url"),
            _secret(fleets, "PROBE_KEY", "probe-key"),
            {"name": "PROBE_PORT", "value": str(fleets.port)},
            {"name": "ISTHMUS_SERVER", "value": fleets.server},
        ],
        "ports": [{"name": "http", "containerPort": fleets.port}],
        # No limit of CPU: a server that is held up at its share misses its objective on an idle machine.
        "resources": {
            "requests": {"cpu": str(fleets.workers * profile.threads), "memory": f"{memory}Mi"},
            "limits": {"memory": f"{2 * memory}Mi"},
        },
        "securityContext": SEALED,
        "startupProbe": {**alive, "periodSeconds": 1, "failureThreshold": 60},
        "livenessProbe": {**alive, "periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": {"exec": {"command": ready}, "timeoutSeconds": 5, "periodSeconds": 5},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_SECONDS)]}}},
        "volumeMounts": [
            {"name": "state", "mountPath": STATE, "readOnly": True},
            {"name": "keys", "mountPath": KEYS, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - of the container
        ],
    }


def _secret(fleets: Fleets, name: str, key: str) -> Manifest:
    """A variable whose value is in the Secret of the fleet, and never here."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": f"{fleets.name}-{COMPONENT}", "key": key}}}
