"""Manifests of the training fleet, from `[profiles.training]`."""

from isthmus.features.profiles import Accelerator
from isthmus.orchestration.fleet.accelerate import PORT
from isthmus.orchestration.fleet.parts import ROOT, SEALED, STATE, Fleets, Manifest, pod

COMPONENT = "training"
CONFIGURATION = "/etc/isthmus/accelerate"

RDMA = "rdma/rdma_shared_device_a"
"""InfiniBand, by the name that NVIDIA's network operator gives it unless it is told another."""

PRODUCTS: dict[Accelerator, tuple[str, ...]] = {
    "nvidia-t4": ("Tesla-T4",),
    "nvidia-a10": ("NVIDIA-A10", "NVIDIA-A10G"),
    "nvidia-l4": ("NVIDIA-L4",),
    "nvidia-a100": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-PCIE-40GB", "NVIDIA-A100-80GB-PCIe"),
    "nvidia-h100": ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
    "nvidia-h200": ("NVIDIA-H200", "NVIDIA-H200-NVL"),
}
"""Accelerators by what NVIDIA's feature discovery writes in a node's label `nvidia.com/gpu.product`."""

RETRIES = 3
"""How often a node may fail. Whatever ends a pod, the next one goes on from the last checkpoint."""


def manifests(fleets: Fleets) -> dict[str, Manifest]:
    """File name to object."""
    profile, labels = fleets.training, fleets.labels(COMPONENT)
    selector = {"matchLabels": labels}
    rules: list[Manifest] = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    if profile.processes == 1:
        # Data, a gate or the configuration: it will be no better the next time. A launcher has 1 for everything.
        refused = {"containerName": "train", "operator": "In", "values": [1, 2]}
        rules.append({"action": "FailJob", "onExitCodes": refused})
    job = {
        "backoffLimit": RETRIES * profile.nodes,
        "completions": profile.nodes,
        "parallelism": profile.nodes,
        # Each pod has its number, and a host name by it.
        "completionMode": "Indexed",
        "podFailurePolicy": {"rules": rules},
        "ttlSecondsAfterFinished": 86400,
        "template": {"metadata": {"labels": labels}, "spec": _pod(fleets)},
    }
    policy = {
        "podSelector": selector,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": selector}]}] if profile.nodes > 1 else [],
    }
    found = {
        "job.yaml": fleets.object("Job", "batch/v1", COMPONENT, spec=job),
        "network.yaml": fleets.object("NetworkPolicy", "networking.k8s.io/v1", COMPONENT, spec=policy),
    }
    if profile.nodes > 1:
        names = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": "rendezvous", "port": PORT}],
        }
        found["service.yaml"] = fleets.object("Service", "v1", COMPONENT, spec=names)
    return found


def first_node(fleets: Fleets) -> str:
    """The name by which the others find the pod with number 0."""
    return f"{fleets.name}-{COMPONENT}-0.{fleets.name}-{COMPONENT}"


def command(fleets: Fleets) -> list[str]:
    """What a pod runs.

    One process is started without a launcher, which would keep the signal to itself that asks for a checkpoint.
    """
    profile = fleets.training
    script = [f"{ROOT}/{profile.script}"]
    if profile.processes == 1:
        return ["python", *script] if profile.script else ["isthmus", "distill", "--project", ROOT]
    launch = ["accelerate", "launch", "--config_file", f"{CONFIGURATION}/accelerate.yaml"]
    return [*launch, "--machine_rank", "$(JOB_COMPLETION_INDEX)", *script]


def _pod(fleets: Fleets) -> Manifest:
    profile = fleets.training
    shared = {"medium": "Memory", "sizeLimit": f"{max(64, profile.memory_mb // 4)}Mi"}
    placed: Manifest = {}
    if profile.nodes > 1:
        placed["subdomain"] = f"{fleets.name}-{COMPONENT}"
    if profile.accelerator is not None:
        products = list(PRODUCTS[profile.accelerator])
        has = {"key": "nvidia.com/gpu.product", "operator": "In", "values": products}
        required = {"nodeSelectorTerms": [{"matchExpressions": [has]}]}
        placed["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        placed["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return pod(
        _container(fleets),
        [
            fleets.state(read_only=False),
            {"name": "accelerate", "configMap": {"name": f"{fleets.name}-accelerate"}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shared", "emptyDir": shared},
        ],
        restartPolicy="Never",
        # A step is finished and a checkpoint written.
        terminationGracePeriodSeconds=120,
        **placed,
    )


def _container(fleets: Fleets) -> Manifest:
    profile = fleets.training
    memory = {"memory": f"{profile.memory_mb}Mi"}
    limits, env = dict(memory), {"HOME": "/tmp", "OMP_NUM_THREADS": str(profile.threads)}  # noqa: S108 - a container's
    if profile.accelerator is not None:
        limits["nvidia.com/gpu"] = str(profile.per_node)
    if profile.accelerator is not None and profile.nodes > 1:
        if profile.interconnect == "infiniband":
            limits[RDMA] = "1"
        else:
            env["NCCL_IB_DISABLE"] = "1"
    return {
        "name": "train",
        "image": fleets.image(COMPONENT),
        "command": command(fleets),
        "workingDir": ROOT,
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "resources": {"requests": {"cpu": str(profile.threads * profile.per_node), **memory}, "limits": limits},
        "securityContext": SEALED,
        "volumeMounts": [
            {"name": "state", "mountPath": STATE},
            {"name": "accelerate", "mountPath": CONFIGURATION, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - of the container
            {"name": "shared", "mountPath": "/dev/shm"},  # noqa: S108 - of the container
        ],
    }
