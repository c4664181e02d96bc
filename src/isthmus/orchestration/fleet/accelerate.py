"""The configuration of `accelerate launch`, from `[profiles.training]`."""

from typing import Any

from isthmus.features.profiles import TrainingProfile

PORT = 29500
"""Where the first process waits for the others: torchrun's own default."""


def configuration(profile: TrainingProfile, main: str) -> dict[str, Any]:
    """What accelerate reads as its `ClusterConfig`.

    Args:
        profile: how the student is trained.
        main: host name of the first node.
    """
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        # accelerate starts several processes under the name of GPUs alone, also where they have none.
        "distributed_type": "MULTI_GPU" if profile.processes > 1 else "NO",
        "mixed_precision": "bf16" if profile.precision == "bf16" else "no",
        "use_cpu": profile.accelerator is None,
        "debug": False,
        "enable_cpu_affinity": False,
        "num_machines": profile.nodes,
        "num_processes": profile.processes,
        "machine_rank": 0,
        "gpu_ids": "all",
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "main_process_port": PORT,
        "dynamo_config": {"dynamo_backend": "INDUCTOR" if profile.compile else "NO"},
    }
    if profile.nodes > 1:
        found["main_process_ip"] = main
    return found
