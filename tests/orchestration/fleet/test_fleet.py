"""`isthmus infra fleet` writes manifests for Kubernetes, a configuration for accelerate, and images."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pyarrow.dataset as ds
import pytest
import yaml
from packaging.requirements import Requirement

from isthmus import ConfigurationError, DataError
from isthmus.features.profiles import ServingProfile, TrainingProfile
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.orchestration.fleet.files import NOTE, constraints, files, fleet
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.serving.settings import VARIABLE, ServerSettings
from tests.orchestration.shop import Shop
from tests.orchestration.streams.buses import DEFINITIONS, RECOMPUTED
from tests.servers import free_port
from tests.serving.support import CONTRACT, write_keys

ROOT = Path(__file__).parents[3]
GPUS = """
[profiles.training]
device = "cuda"
accelerator = "nvidia-a100"
precision = "bf16"
nodes = 2
per_node = 4
threads = 3
interconnect = "infiniband"
script = "train.py"
compile = true
"""
PROJECTS = {
    "defaults": "",
    "gpus": GPUS,
    "one_gpu": '[profiles.training]\ndevice = "auto"\naccelerator = "nvidia-t4"\n',
    "cpus": '[profiles.training]\nper_node = 2\nscript = "jobs/train.py"\n',
    "distilling": "[profiles.training]\nnodes = 2\nper_node = 2\n",
    "side_by_side": "[profiles.training]\nparallel = 6\n",
    "servers": (
        "[profiles.serving]\nreplicas_min = 3\nreplicas_max = 3\ntarget_utilization = 0.75\nthreads = 2\n"
        "memory_mb = 100\nbatch = 32\n[server]\nworkers = 4\nport = 8080\n[server.limits]\ndeadline_seconds = 9.5\n"
        '[stores]\nonline = "rediss+cluster://one:7000,two:7001"\n'
    ),
    "streams": "",
    "records": '[server.record]\nshare = 0.5\nprivate = ["profile"]\nmemory_mb = 7.5\n',
}
Made = Mapping[str, Any]


def project(folder: Path, text: str = "", *, name: str = "shop", engine: str = "sail") -> Project:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "isthmus.toml").write_text(f'engine = "{engine}"\n[project]\nname = "{name}"\n{text}')
    return Project(folder)


def read(content: Mapping[str, bytes]) -> dict[str, Any]:
    """All YAML but the templates of the chart, which are YAML only with their values."""
    return {
        name: yaml.safe_load(one)
        for name, one in content.items()
        if name.endswith(".yaml") and not name.startswith("chart/templates/")
    }


def rendered(content: Mapping[str, bytes], values: Any) -> dict[str, Any]:
    """The manifests of the chart by file. It has no logic, so this is all that Helm does with it."""

    def inserted(found: re.Match[str]) -> str:
        group, name = found[1].split(".")
        return json.dumps(values[group][name])

    made = {}
    for name, text in content.items():
        if name.startswith("chart/templates/"):
            plain = re.sub(r"\{\{ toJson \.Values\.(\w+\.\w+) \}\}", inserted, text.decode())
            assert "{{" not in plain.replace('{{ "{{" }}', ""), name
            made[name.removeprefix("chart/templates/")] = yaml.safe_load(plain.replace('{{ "{{" }}', "{{"))
    return made


@pytest.fixture(params=PROJECTS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    return made_of(tmp_path, request.param)


def made_of(tmp_path: Path, key: str) -> Made:
    if key == "streams":
        definitions = (DEFINITIONS + RECOMPUTED).format(stream='Kafka("stops", "broker:9092")')
        (tmp_path / "definitions.py").write_text(definitions)
    return made_of_text(tmp_path, PROJECTS[key])


def made_of_text(tmp_path: Path, text: str) -> Made:
    return read(files(project(tmp_path, text)))


def manifests(made: Made) -> dict[str, Any]:
    """Without what is for kustomize, KEDA, Helm and accelerate."""
    return {
        name: one
        for name, one in made.items()
        if "apiVersion" in one and one.get("kind") not in ("Kustomization", None)
        and not name.startswith(("components/", "chart/"))
    }  # fmt: skip


def pod(made: Made, component: str) -> Any:
    return template(made, component)["spec"]


def template(made: Made, component: str) -> Any:
    if component == "recorded":
        return made["base/recorded/cronjob.yaml"]["spec"]["jobTemplate"]["spec"]["template"]
    kind = "job" if component == "training" else "deployment"
    return made[f"base/{component}/{kind}.yaml"]["spec"]["template"]


# --- manifests


@pytest.mark.accept
def test_every_manifest_keeps_to_the_official_schemas(made: Made) -> None:
    kinds = set()
    for manifest in manifests(made).values():
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
        kinds.add(manifest["kind"])
    assert kinds == {
        "Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy", "Job",
        "PersistentVolumeClaim",
    } | ({"CronJob"} if "base/recorded/cronjob.yaml" in made else set())  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [("minReplicas", "2"), ("minReplica", 2), ("maxReplicas", None)])
def test_the_schemas_refuse_what_is_wrong(tmp_path: Path, key: str, value: object) -> None:
    manifest = made_of(tmp_path, "defaults")["base/serving/autoscaler.yaml"]
    manifest["spec"][key] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_kustomizations_list_every_manifest_once(made: Made) -> None:
    """As `kubectl apply -k` reads them: from an overlay down, and never from outside what a file lists."""
    listed: list[str] = []

    def visit(folder: Path) -> None:
        content = made[f"{folder}/kustomization.yaml"]
        assert (content["kind"], content["apiVersion"]) == ("Kustomization", "kustomize.config.k8s.io/v1beta1")
        for resource in content["resources"]:
            place = Path(os.path.normpath(folder / resource))
            # What lies around a folder cannot be below it, too.
            assert not folder.is_relative_to(place)
            if place.suffix:
                listed.append(str(place))
            else:
                visit(place)
        for generator in content.get("configMapGenerator", []):
            listed.extend(str(folder / file) for file in generator["files"])

    visit(Path("overlays/example"))
    assert sorted(listed) == sorted([*manifests(made), "base/training/accelerate.yaml"])
    images = {pod(made, component)["containers"][0]["image"].split(":")[0] for component in ("serving", "training")}
    assert {one["name"] for one in made["overlays/example/kustomization.yaml"]["images"]} == images
    maps = {one["name"] for one in made["base/training/kustomization.yaml"]["configMapGenerator"]}
    assert {v["configMap"]["name"] for v in pod(made, "training")["volumes"] if "configMap" in v} == maps


@pytest.mark.parametrize("key", PROJECTS)
def test_a_chart_with_its_values_is_the_base(tmp_path: Path, key: str) -> None:
    made = made_of(tmp_path, key)
    content = files(Project(tmp_path))
    values = made["chart/values.yaml"]
    base = {name.removeprefix("base/").replace("/", "-"): one for name, one in made.items() if name.startswith("base/")}
    base = {name: one for name, one in base.items() if not name.endswith("kustomization.yaml")}
    found = rendered(content, values)
    configured = found.pop("training-accelerate.yaml")
    assert yaml.safe_load(configured["data"]["accelerate.yaml"]) == base.pop("training-accelerate.yaml")
    assert configured["metadata"]["name"] == pod(made, "training")["volumes"][1]["configMap"]["name"]
    assert found == base
    assert {*values["resources"]} == {name.split("-")[0] for name, one in base.items() if "containers" in str(one)}
    values["images"]["serving"], values["replicas"]["maxReplicas"] = "registry/other:2", 20
    values["resources"]["serving"]["limits"]["memory"] = "9Gi"
    found = rendered(content, values)
    (server,) = found["serving-deployment.yaml"]["spec"]["template"]["spec"]["containers"]
    assert (server["image"], server["resources"]["limits"]["memory"]) == ("registry/other:2", "9Gi")
    assert found["serving-autoscaler.yaml"]["spec"]["maxReplicas"] == 20
    assert made["chart/Chart.yaml"]["name"] == "shop"


def test_braces_of_a_project_are_not_read_by_helm(tmp_path: Path) -> None:
    content = files(project(tmp_path, '[server]\nhosts = ["{{.x}}", "VALUE_images.serving_"]\n'))
    assert b'{{ "{{" }}.x' in content["chart/templates/serving-deployment.yaml"]
    made = read(content)
    found = rendered(content, made["chart/values.yaml"])
    assert found["serving-deployment.yaml"] == made["base/serving/deployment.yaml"]


@pytest.mark.parametrize("key", ["defaults", "servers"])
def test_a_fleet_scales_from_zero_by_requests_that_the_add_on_holds(tmp_path: Path, key: str) -> None:
    made = made_of(tmp_path, key)
    folder = "components/from-zero"
    component, route, scaling = (made[f"{folder}/{name}.yaml"] for name in ("kustomization", "route", "scaling"))
    assert (component["kind"], component["resources"]) == ("Component", ["route.yaml", "scaling.yaml"])
    # Two autoscalers of one Deployment would work against each other.
    (patch,) = component["patches"]
    replaced, base = yaml.safe_load(patch["patch"]), made["base/serving/autoscaler.yaml"]
    assert replaced.pop("$patch") == "delete"
    assert replaced == {"apiVersion": base["apiVersion"], "kind": base["kind"], "metadata": {"name": "shop-serving"}}
    service, spec = made["base/serving/service.yaml"], scaling["spec"]
    assert route["spec"]["target"] == {
        "service": service["metadata"]["name"], "portName": service["spec"]["ports"][0]["name"],
    }  # fmt: skip
    assert spec["scaleTargetRef"] == base["spec"]["scaleTargetRef"]
    # In a cluster that has that autoscaler already, KEDA takes it over.
    assert scaling["metadata"]["annotations"] == {"scaledobject.keda.sh/transfer-hpa-ownership": "true"}
    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["name"] == base["metadata"]["name"]
    pushed, cpu = spec["triggers"]
    assert pushed["metadata"]["interceptorRoute"] == route["metadata"]["name"]
    utilization = base["spec"]["metrics"][0]["resource"]["target"]["averageUtilization"]
    assert (cpu["type"], int(cpu["metadata"]["value"])) == ("cpu", utilization)
    sizes = [spec[name] for name in ("idleReplicaCount", "minReplicaCount", "maxReplicaCount")]
    assert sizes == [0, base["spec"]["minReplicas"], base["spec"]["maxReplicas"]]
    workers = {"defaults": 1, "servers": 4}[key]
    assert route["spec"]["scalingMetric"] == {"concurrency": {"targetValue": 128 * workers}}
    # Off unless an overlay asks for it.
    assert "components" not in made["overlays/example/kustomization.yaml"]


def test_servers_on_a_gpu_get_one_and_its_onnx_runtime(tmp_path: Path) -> None:
    content = files(project(tmp_path, '[profiles.serving]\ndevice = "tensorrt"\n'))
    spec = pod(read(content), "serving")
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    # CUDA's libraries need memory, and TensorRT needs time before the first answer.
    assert spec["containers"][0]["resources"]["requests"]["memory"] == f"{192 + 1024 + 64}Mi"
    assert spec["containers"][0]["startupProbe"]["failureThreshold"] == 600
    # ONNX Runtime 1.31 links to libnvinfer.so.10.
    installed = f'"onnxruntime-gpu[cuda,cudnn]=={metadata.version("onnxruntime")}" "tensorrt<11"\n'.encode()
    assert installed in content["images/Dockerfile.serving"]
    plain = files(project(tmp_path / "cpu"))
    assert b"onnxruntime-gpu" not in plain["images/Dockerfile.serving"]
    assert b"gpu" not in plain["base/serving/deployment.yaml"]


def test_a_machine_with_the_build_for_gpus_pins_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [package for package in metadata.distributions() if package.name != "onnxruntime"]

    def version(name: str) -> str:
        return next((package.version for package in others if package.name == name), "") or missing(name)

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    expected = f"\nonnxruntime=={metadata.version('onnxruntime')}\n"
    monkeypatch.setattr(metadata, "distributions", lambda: others)
    monkeypatch.setattr(metadata, "version", version)
    constraints.cache_clear()
    try:
        content = files(project(tmp_path, '[profiles.serving]\ndevice = "cuda"\n'))
    finally:
        constraints.cache_clear()
    assert expected in content["images/constraints.txt"].decode()
    assert (
        f"[cuda,cudnn]{expected.strip().removeprefix('onnxruntime')}" in content["images/Dockerfile.serving"].decode()
    )


@pytest.mark.parametrize("name", ["null", "true", "on", "y"])
def test_a_project_may_have_the_name_of_a_yaml_word(tmp_path: Path, name: str) -> None:
    made = read(files(project(tmp_path, name=name)))
    assert made["chart/Chart.yaml"]["name"] == made["overlays/example/kustomization.yaml"]["namespace"] == name


def test_selectors_find_their_pods_and_no_others(made: Made) -> None:
    optional = {"recorded": "base/recorded/cronjob.yaml", "stream": "base/stream/deployment.yaml"}
    components = ["serving", "training", *(name for name, file in optional.items() if file in made)]
    labels = {component: template(made, component)["metadata"]["labels"] for component in components}
    assert len({str(own) for own in labels.values()}) == len(labels)
    for file, manifest in manifests(made).items():
        spec = manifest["spec"]
        selector = spec.get("selector", spec.get("podSelector"))
        if selector is not None:
            assert selector.get("matchLabels", selector) == labels[Path(file).parent.name], file


@pytest.mark.accept
@pytest.mark.parametrize("component", ["serving", "training", "recorded", "stream"])
def test_no_pod_may_more_than_it_needs(made: Made, component: str) -> None:
    if component in ("recorded", "stream") and f"base/{component}/kustomization.yaml" not in made:
        assert not any(name.startswith(f"base/{component}/") for name in made), "nothing to do"
        return
    spec = pod(made, component)
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 9999
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert not container["image"].endswith(":latest")
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]


def test_the_serving_profile_is_in_the_manifests(tmp_path: Path) -> None:
    made = made_of(tmp_path, "servers")
    scaler = made["base/serving/autoscaler.yaml"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 3)
    assert scaler["metrics"][0]["resource"]["target"] == {"type": "Utilization", "averageUtilization": 75}
    assert scaler["scaleTargetRef"]["name"] == made["base/serving/deployment.yaml"]["metadata"]["name"]
    assert "replicas" not in made["base/serving/deployment.yaml"]["spec"]
    spec = pod(made, "serving")
    (container,) = spec["containers"]
    # Four workers of two threads; each with its own copy of the model.
    assert container["resources"]["requests"] == {"cpu": "8", "memory": f"{4 * (192 + 100)}Mi"}
    # What is under way when a server is told to end is answered.
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > wait + 9.5 + 1
    policy = made["base/serving/network.yaml"]["spec"]
    ports = [entry["port"] for rule in policy["egress"] for entry in rule["ports"]]
    assert ports == [7000, 7001, 53, 53]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert container["ports"] == [{"name": "http", "containerPort": 8080}]


def test_what_servers_record_is_on_the_volume_and_collected_by_their_user(tmp_path: Path) -> None:
    made = made_of(tmp_path, "records")
    serving, recorded = pod(made, "serving"), pod(made, "recorded")
    (server,), (collector,) = serving["containers"], recorded["containers"]
    assert serving["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shop-state", "readOnly": False}
    assert [mount for mount in server["volumeMounts"] if mount["name"] == "state"] == [
        {"name": "state", "mountPath": "/project/.isthmus", "readOnly": True},
        {"name": "state", "mountPath": "/var/spool/isthmus", "subPath": "recorded/spool"},
    ]
    assert recorded["volumes"][0]["persistentVolumeClaim"] == serving["volumes"][0]["persistentVolumeClaim"]
    assert collector["volumeMounts"][0] == {"name": "state", "mountPath": "/project/.isthmus"}
    assert recorded["securityContext"] == serving["securityContext"]
    assert collector["command"] == ["isthmus", "answers", "collect", "--project", "/project"]
    assert collector["image"] == pod(made, "training")["containers"][0]["image"]
    assert "envFrom" not in collector
    (key,) = [one["valueFrom"] for one in server["env"] if one["name"] == "SPOOL_KEY"]
    assert key == {"secretKeyRef": {"name": "shop-serving", "key": "spool-key"}}
    assert server["resources"]["requests"]["memory"] == f"{192 + 64 + 8}Mi"
    stored = made_of_text(tmp_path / "stored", '[stores]\noffline = "s3://bucket/shop"\n[server.record]\n')
    assert pod(stored, "recorded")["containers"][0]["envFrom"] == [
        {"secretRef": {"name": "shop-recorded", "optional": True}}
    ]
    assert "SPOOL_KEY" not in str(pod(stored, "serving"))


def test_one_pod_reads_the_streams_of_the_definitions(tmp_path: Path) -> None:
    made = made_of(tmp_path, "streams")
    deployment = made["base/stream/deployment.yaml"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    (container,) = pod(made, "stream")["containers"]
    assert container["command"] == ["isthmus", "stream", "--project", "/project"]
    assert container["image"] == pod(made, "training")["containers"][0]["image"]
    assert b"ARG EXTRAS=distill,transforms,streams\n" in files(Project(tmp_path))["images/Dockerfile.training"]


def test_the_training_profile_is_in_the_job(tmp_path: Path) -> None:
    made = made_of(tmp_path, "gpus")
    job, spec = made["base/training/job.yaml"]["spec"], pod(made, "training")
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert spec["subdomain"] == made["base/training/service.yaml"]["metadata"]["name"]
    assert made["base/training/service.yaml"]["spec"]["clusterIP"] == "None"
    resources = spec["containers"][0]["resources"]
    assert resources["limits"] == {"memory": "8192Mi", "nvidia.com/gpu": "4", "rdma/rdma_shared_device_a": "1"}
    assert resources["requests"]["cpu"] == "12"
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert all("A100" in product for product in term["matchExpressions"][0]["values"])
    # Whatever ends a pod, another goes on; what is wrong with one process stays wrong.
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["Ignore"]


def test_one_process_is_started_without_a_launcher(tmp_path: Path) -> None:
    made = made_of(tmp_path, "defaults")
    assert pod(made, "training")["containers"][0]["command"] == ["isthmus", "distill", "--project", "/project"]
    assert "base/training/service.yaml" not in made
    rules = made["base/training/job.yaml"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[-1]["onExitCodes"]["values"] == [1, 2]
    assert "affinity" not in pod(made, "training")


def test_a_pod_for_each_part_of_the_students_and_controls(tmp_path: Path) -> None:
    made = made_of(tmp_path, "side_by_side")
    job = made["base/training/job.yaml"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 6, 6)
    command = pod(made, "training")["containers"][0]["command"]
    assert command == ["isthmus", "distill", "--project", "/project", "--part", "$(JOB_COMPLETION_INDEX)/6"]
    assert "base/training/service.yaml" not in made  # they share the volume alone
    assert made["base/state/claim.yaml"]["spec"]["accessModes"] == ["ReadWriteMany"]


# --- what runs


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("defaults", {"distributed_type": "NO", "num_machines": 1, "num_processes": 1, "use_cpu": True}),
        ("one_gpu", {"distributed_type": "NO", "num_machines": 1, "num_processes": 1, "use_cpu": False}),
        ("distilling", {"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 4, "use_cpu": True}),
        ("cpus", {"distributed_type": "MULTI_GPU", "num_machines": 1, "num_processes": 2, "use_cpu": True}),
        ("gpus", {"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 8, "use_cpu": False,
                  "mixed_precision": "bf16", "main_process_ip": "shop-training-0.shop-training"}),
    ],
)  # fmt: skip
def test_accelerate_takes_its_configuration(tmp_path: Path, key: str, expected: Mapping[str, object]) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    content = files(project(tmp_path / "shop", PROJECTS[key]))
    file = tmp_path / "accelerate.yaml"
    file.write_bytes(content["base/training/accelerate.yaml"])
    loaded = load_config_from_file(str(file))
    assert isinstance(loaded, ClusterConfig)
    assert {name: loaded.to_dict()[name] for name in expected} == expected
    command = pod(read(content), "training")["containers"][0]["command"]
    if loaded.num_processes == 1:
        assert "accelerate" not in command
        return
    # The second node, as Kubernetes fills in its number.
    assert command[:2] == ["accelerate", "launch"]
    given = [argument.replace("$(JOB_COMPLETION_INDEX)", "1") for argument in command[2:]]
    given[given.index("--config_file") + 1] = str(file)
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    assert (arguments.num_machines, arguments.num_processes) == (loaded.num_machines, loaded.num_processes)
    assert (arguments.machine_rank, arguments.multi_gpu) == (1, True)
    assert arguments.main_process_ip == loaded.main_process_ip
    if key == "distilling":
        assert (arguments.module, arguments.training_script) == (True, "isthmus")
        assert arguments.training_script_args == ["distill", "--project", "/project"]
        return
    assert arguments.training_script.startswith("/project/")
    assert arguments.training_script.endswith("train.py")


@pytest.mark.accept
def test_the_server_of_the_deployment_runs_and_its_probe_tells_when(tmp_path: Path) -> None:
    """Its command and its variables, as Kubernetes would fill them in, on this machine."""
    state, keys, port = tmp_path / "state", tmp_path / "keys", free_port()
    state.mkdir()
    content = files(project(tmp_path / "shop", f"[server]\nport = {port}\nworkers = 2\n"))
    (container,) = pod(read(content), "serving")["containers"]
    (key,) = write_keys(keys / "keys.json", probe="read:probe").values()
    with EmbeddedRedis(tmp_path / "redis") as redis:
        secrets = {"REDIS_URL": redis.url, "PROBE_KEY": key}
        given = {one["name"]: one.get("value") or secrets[one["name"]] for one in container["env"]}
        given[VARIABLE] = given[VARIABLE].replace("$(REDIS_URL)", redis.url)
        for mount in container["volumeMounts"]:
            place = {"state": state, "keys": keys}.get(mount["name"])
            given[VARIABLE] = given[VARIABLE].replace(mount["mountPath"], str(place)) if place else given[VARIABLE]
        environment = {**os.environ, **given}
        python = {"python": sys.executable}

        def ready() -> bool:
            probe = [python.get(word, word) for word in container["readinessProbe"]["exec"]["command"]]
            return subprocess.run(probe, env=environment, check=False, capture_output=True, timeout=20).returncode == 0

        assert not ready()
        server = subprocess.Popen(
            [python.get(word, word) for word in container["command"]], env=environment, stderr=subprocess.DEVNULL
        )
        try:
            wait_until_listening(port)
            assert not ready()  # up, and without a contract
            (state / "contract.json").write_bytes(CONTRACT.dumps())
            deadline = time.monotonic() + 30
            while not ready():
                assert time.monotonic() < deadline
            environment["PROBE_KEY"] = "another"
            assert not ready()
        finally:
            server.terminate()
            assert server.wait(30) == 0


def wait_until_listening(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError


def test_a_server_is_told_what_the_project_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = project(tmp_path, PROJECTS["servers"])
    told = {one["name"]: one.get("value") for one in pod(read(files(opened)), "serving")["containers"][0]["env"]}
    write_keys(tmp_path / "keys.json", someone="read:*")
    text = told[VARIABLE].replace("/etc/isthmus/keys", str(tmp_path)).replace("$(REDIS_URL)", "redis://:p%40ss@there")
    monkeypatch.setenv(VARIABLE, text)
    settings = ServerSettings.from_environment()
    assert set(json.loads(text)) == {*ServerSettings.__struct_fields__}
    assert (settings.record, settings.spool, settings.history_seconds) == (None, None, 60.0)
    assert (settings.host, settings.port, settings.workers, settings.batch) == ("0.0.0.0", 8080, 4, 32)  # noqa: S104
    assert (settings.redis, settings.limits) == ("redis://:p%40ss@there", opened.settings.server.limits)


def test_a_server_records_as_the_project_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = project(tmp_path, PROJECTS["records"])
    told = {one["name"]: one.get("value") for one in pod(read(files(opened)), "serving")["containers"][0]["env"]}
    write_keys(tmp_path / "keys.json", someone="read:*")
    text = told[VARIABLE].replace("/etc/isthmus/keys", str(tmp_path)).replace("$(REDIS_URL)", "redis://there")
    monkeypatch.setenv(VARIABLE, text.replace("$(SPOOL_KEY)", "ab" * 32))
    settings = ServerSettings.from_environment()
    assert (settings.record, settings.spool) == (opened.settings.server.record, "/var/spool/isthmus")
    assert settings.spool_key == "ab" * 32


def test_the_dashboard_and_its_alerts_come_along(tmp_path: Path) -> None:
    written = files(project(tmp_path))
    package = ROOT / "src" / "isthmus" / "serving"
    assert written["monitoring/dashboard.json"] == (package / "grafana" / "isthmus.json").read_bytes()
    assert written["monitoring/alerts.yaml"] == (package / "prometheus" / "alerts.yaml").read_bytes()


def test_the_settings_of_the_documentation_are_settings(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "fleets.md").read_text(), re.MULTILINE | re.DOTALL)
    profiles = project(tmp_path, block).settings.profiles
    # All that there are, and those of servers as they are by default.
    shown = tomllib.loads(block)["profiles"]
    assert shown["training"].keys() | {"epochs", "compile", "give_way"} == {
        field.name for field in fields(TrainingProfile)
    }
    assert profiles.serving == ServingProfile()


# --- images


def instructions(text: str) -> list[tuple[str, str]]:
    joined = text.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def needed(extras: set[str]) -> set[str]:
    """Every package that `pip install isthmus[extras]` brings, those of packages included."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = table["optional-dependencies"]
    waiting = [Requirement(line) for line in table["dependencies"]]
    waiting += [Requirement(line) for extra in extras for line in own[extra]]
    found: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        for extra in {"", *requirement.extras}:
            if (name, extra) in found:
                continue
            found.add((name, extra))
            lines = own.get(extra, []) if name == "isthmus" else metadata.requires(name) or []
            for one in map(Requirement, lines):
                if one.marker is None or one.marker.evaluate({"extra": extra}):
                    waiting.append(one)
    return {name for name, _ in found}


def installed(dockerfile: str) -> set[str]:
    """The extras of Isthmus that an image installs."""
    arguments = dict(argument.split("=", 1) for word, argument in instructions(dockerfile) if word == "ARG")
    extras: set[str] = set()
    for word, line in instructions(dockerfile):
        if word == "RUN" and (match := re.search(r"\.whl(?:\[(.*?)\])?\"", line)):
            named = re.sub(r"\$\{(\w+)\}", lambda variable: arguments[variable[1]], match[1] or "")
            extras |= set(named.split(",")) - {""}
    return extras


@pytest.mark.parametrize("key", PROJECTS)
@pytest.mark.parametrize("image", ["serving", "training"])
def test_images_are_sound(tmp_path: Path, key: str, image: str) -> None:
    content = files(project(tmp_path, PROJECTS[key]))
    text = content[f"images/Dockerfile.{image}"].decode()
    found = instructions(text)
    known = {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER", "EXPOSE", "CMD"}
    assert {word for word, _ in found} <= known
    stages = [n for n, (word, _) in enumerate(found) if word == "FROM"]
    assert len(stages) == 2
    (base,) = [line.removeprefix("BASE=") for word, line in found if word == "ARG" and line.startswith("BASE=")]
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", base)
    assert {found[n][1].split()[0] for n in stages} == {"${BASE}"}
    last = found[stages[-1] :]
    (user,) = [line for word, line in last if word == "USER"]
    spec = pod(read(content), image)["securityContext"]
    assert user == f"{spec['runAsUser']}:{spec['runAsGroup']}"
    assert [word for word, _ in last].index("USER") > max(n for n, (word, _) in enumerate(last) if word == "RUN")
    assert ":latest" not in text
    assert not re.search(r"(?i)secret|password|token", text)
    installs = [line for _, line in found if "pip install" in line]
    assert all("--constraint /build/constraints.txt" in line for line in installs)
    (command,) = [json.loads(line) for word, line in last if word == "CMD"]
    assert command[0] in ("python", "isthmus")  # and no shell, which would keep signals to itself


def test_a_server_s_image_has_neither_torch_nor_spark(tmp_path: Path) -> None:
    content = files(project(tmp_path))
    heavy = {"torch", "pyspark", "pysail", "dagster", "feast", "accelerate", "scikit-learn"}
    assert installed(content["images/Dockerfile.serving"].decode()) == set()
    assert needed(set()) & heavy == set()
    assert needed({"signing"}) & heavy == set()
    trained = installed(content["images/Dockerfile.training"].decode())
    assert {"torch", "accelerate", "pyspark", "scikit-learn"} <= needed(trained)


STEP = """
import ast, inspect, sys
from pathlib import Path

sys.prefix = sys.exec_prefix = sys.argv[2]  # the links lead there: what is installed is not the project's code
from isthmus.orchestration.graph import child, steps
from isthmus.orchestration.steps.step import StepRequest
from isthmus.orchestration.project import Project

for module in (steps, *steps.ROOMS):
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom):
            exec(ast.unparse(node))
(made,) = steps.run_step(Project(Path(sys.argv[1])), StepRequest("apply", ("contract",)), lambda text, done: None)
print(made.version)
"""
"""What the process of a step loads, whichever step it is, and `apply` itself."""


def image_of(extras: set[str], folder: Path) -> Path:
    """The packages that `pip install isthmus[extras]` brings, and no others: links to those of this environment."""
    folder.mkdir()
    wanted = needed(extras)
    for one in metadata.distributions():
        if one.name.lower().replace("_", "-") in wanted - {"isthmus"}:
            tops = {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}
            for top in tops:
                if not (folder / top).exists():
                    (folder / top).symlink_to(Path(str(one.locate_file(top))))
    (folder / "isthmus").symlink_to(ROOT / "src" / "isthmus")
    return folder


@pytest.mark.accept
def test_a_step_of_dagster_finds_what_it_needs_in_the_image_that_is_documented(shop: Shop, tmp_path: Path) -> None:
    (named,) = re.findall(r"--build-arg EXTRAS=(\S+)", (ROOT / "docs" / "dagster.md").read_text())
    plain = installed(files(project(tmp_path))["images/Dockerfile.training"].decode())

    def step(extras: set[str], name: str) -> subprocess.CompletedProcess[str]:
        packages = image_of(extras, tmp_path / name)
        return subprocess.run(
            [sys.executable, "-S", "-P", "-c", STEP, str(shop.root), sys.prefix],
            env={"PYTHONPATH": str(packages), "PATH": os.defpath}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    done = step(set(named.split(",")), "documented")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == json.loads((shop.state / "contract.json").read_bytes())["hash"]
    assert "No module named 'dagster_pipes'" in step(plain, "plain").stderr, "the image for training alone"


@pytest.mark.accept
def test_what_a_server_of_the_fleet_records_is_collected_in_the_image_for_training(tmp_path: Path) -> None:
    """Its command and variables, and those of the CronJob with the packages of its image, on this machine."""
    port = free_port()
    opened = project(tmp_path / "shop", f'[server]\nport = {port}\n[server.record]\nprivate = ["punctuality"]\n')
    made = read(files(opened))
    (server,), (collector,) = pod(made, "serving")["containers"], pod(made, "recorded")["containers"]
    key = write_keys(tmp_path / "keys" / "keys.json", someone="read:*")["someone"]
    opened.state.mkdir()
    opened.contract_file.write_bytes(CONTRACT.dumps())
    with EmbeddedRedis(tmp_path / "redis") as redis:
        given = {one["name"]: one["value"] for one in server["env"] if "value" in one}[VARIABLE]
        for name, value in {"REDIS_URL": redis.url, "SPOOL_KEY": "ab" * 32}.items():
            given = given.replace(f"$({name})", value)
        mounts = {mount["mountPath"]: mount for mount in server["volumeMounts"]}
        places = {"/etc/isthmus/keys": tmp_path / "keys"} | {
            path: opened.state / mount.get("subPath", "") for path, mount in mounts.items() if mount["name"] == "state"
        }
        for path, place in places.items():
            given = given.replace(path, str(place))
        process = subprocess.Popen(
            [sys.executable, *server["command"][1:]], env={**os.environ, VARIABLE: given}, stderr=subprocess.DEVNULL
        )
        try:
            wait_until_listening(port)
            asked = {"features": ["punctuality:flights"], "entities": {"carrier": ["hunter2"]}}
            url, headers = f"http://127.0.0.1:{port}/get-online-features", {"authorization": f"Bearer {key}"}
            identity = httpx.post(url, json=asked, headers=headers).headers["isthmus-answer"]
        finally:
            process.terminate()
            assert process.wait(30) == 0
    packages = image_of(installed(files(opened)["images/Dockerfile.training"].decode()), tmp_path / "packages")
    program = f"import sys; sys.prefix = sys.exec_prefix = {sys.prefix!r}; sys.argv[0] = 'isthmus'"
    program += "; from isthmus.orchestration.cli.cli import main; main()"
    arguments = [word.replace("/project", str(opened.root)) for word in collector["command"][1:]]
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", program, *arguments, "--json"],
        env={"PYTHONPATH": str(packages), "PATH": os.defpath}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"answers": 1, "missing": 0, "problems": []}
    (row,) = RecordedAnswers.of(opened).read(ds.scalar(True)).to_pylist()
    assert (row["id"], row["hashed"]) == (identity, ["carrier"])
    assert "hunter2" not in row["request"]


def test_images_of_what_a_project_needs(tmp_path: Path) -> None:
    plain = files(project(tmp_path))["images/Dockerfile.training"].decode()
    assert "CPU build of torch" in plain
    assert "jre" not in plain
    special = files(project(tmp_path, GPUS, engine="spark"))["images/Dockerfile.training"].decode()
    assert "CPU build of torch" not in special
    final = special[special.rindex("FROM") :]
    assert "openjdk-17-jre-headless" in final
    assert "g++" in final


@pytest.mark.parametrize("key", PROJECTS)
def test_torch_comes_from_the_index_that_the_build_names(tmp_path: Path, key: str) -> None:
    content = files(project(tmp_path, PROJECTS[key]))
    assert not any(b"://" in text for name, text in content.items() if name.startswith("images/"))
    lines = instructions(content["images/Dockerfile.training"].decode())
    (install,) = [line for word, line in lines if word == "RUN" and line.endswith(" torch")]
    assert ("ARG", "TORCH_INDEX=") in lines

    def run(index: str) -> str:
        command = ["sh", "-c", f"echo {install}"]
        return subprocess.run(command, env={"TORCH_INDEX": index}, capture_output=True, text=True, check=True).stdout

    assert run("https://cpu").endswith("/build/constraints.txt --index-url https://cpu torch\n")
    assert run("").endswith("/build/constraints.txt torch\n")


def test_a_project_s_image_has_its_code_and_not_its_state(tmp_path: Path) -> None:
    rules = files(project(tmp_path))["images/Dockerfile.training.dockerignore"].decode().splitlines()
    assert rules[0] == "*"
    assert {rule for rule in rules if rule.startswith("!")} == {"!isthmus.toml", "!**/*.py"}
    assert rules[-1] == "**/.*"  # `.isthmus` with everything below it, whatever it is named


def test_images_install_what_is_installed_here() -> None:
    lines = dict(line.split("==") for line in constraints().splitlines())
    assert lines["torch"] == metadata.version("torch").partition("+")[0]
    assert lines["pyarrow"] == metadata.version("pyarrow")
    assert "isthmus" not in lines
    assert [*lines] == sorted(lines)


# --- the folder


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_same_project_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        fleet(project(tmp_path / name / "shop", GPUS), tmp_path / name / "out")
    assert snapshot(tmp_path / "one" / "out") == snapshot(tmp_path / "two" / "out")
    again = snapshot(tmp_path / "one" / "out")
    fleet(project(tmp_path / "one" / "shop", GPUS), tmp_path / "one" / "out")
    assert snapshot(tmp_path / "one" / "out") == again


def test_what_is_no_longer_made_goes_and_what_others_wrote_stays(tmp_path: Path) -> None:
    out, own = tmp_path / "out", tmp_path / "out" / "overlays" / "production" / "kustomization.yaml"
    fleet(project(tmp_path / "shop", GPUS), out)
    own.parent.mkdir()
    own.write_text("mine")
    assert (out / "base/training/service.yaml").exists()
    written = fleet(project(tmp_path / "shop"), out)
    assert not (out / "base/training/service.yaml").exists()
    assert own.read_text() == "mine"
    assert snapshot(out).keys() == {*written, NOTE, "overlays/production/kustomization.yaml"}


def _edited(out: Path) -> str:
    (out / "base/serving/deployment.yaml").write_text("mine")
    return "base/serving/deployment.yaml"


def _stale(out: Path) -> str:
    (out / "base/training/service.yaml").write_text("mine")
    return "base/training/service.yaml"


def _without_note(out: Path) -> str:
    (out / NOTE).unlink()
    return "base/training/job.yaml"


def _folder_in_the_way(out: Path) -> str:
    (out / "images/constraints.txt").unlink()
    (out / "images/constraints.txt").mkdir()
    return "images/constraints.txt"


def _broken_note(out: Path) -> str:
    (out / NOTE).write_text("[]")
    return NOTE


@pytest.mark.parametrize("change", [_edited, _stale, _without_note, _folder_in_the_way, _broken_note])
def test_nothing_of_somebody_else_is_replaced(tmp_path: Path, change: Any) -> None:
    out = tmp_path / "out"
    fleet(project(tmp_path / "shop", GPUS), out)
    named, before = change(out), snapshot(out)
    with pytest.raises(DataError, match=re.escape(named)):
        fleet(project(tmp_path / "shop"), out)
    assert snapshot(out) == before


def test_a_note_names_nothing_outside(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.write_bytes(b"")
    fleet(project(tmp_path / "shop"), out)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (out / NOTE).write_text(json.dumps({"files": {"../other": empty, str(other): empty}}))
    fleet(project(tmp_path / "shop"), out)
    assert other.exists()


# --- what is refused


REFUSED = [
    ({"name": "2shop"}, "", "project.name: '2shop'; expected a letter first"),
    ({"name": "shop-"}, "", "project.name: 'shop-'; expected a letter first"),
    ({"name": "s" * 41}, "", "and at most 40 characters"),
    ({}, "[server]\nport = 0\n", "server.port: 0; expected a fixed port"),
    ({}, '[stores]\nonline = "unix:///run/redis"\n', "stores.online: 'unix:///run/redis'; expected the URL of a Redis"),
    ({}, '[stores]\nonline = "redis://"\n', "stores.online: 'redis://'; expected the URL of a Redis"),
    ({}, '[stores]\nonline = "redis://:hunter2@there"\n', "stores.online: has a password; expected no password in"),
    ({}, '[stores]\noffline = "tables"\n[server.record]\n', "stores.offline: 'tables'; expected a folder in .isthmus"),
    ({}, "[profiles.training]\nparallel = 2\nper_node = 2\n", "parallel: 2, which does not go together with script"),
    ({}, "[profiles.training]\nshard = true\ncompile = true\n", "shard: true, which does not go together with compile"),
    ({}, '[profiles.training]\ndevice = "cuda"\n', "profiles.training.accelerator: is not set; expected the"),
]


@pytest.mark.parametrize(("named", "text", "said"), REFUSED)
def test_what_other_machines_cannot_have_is_refused(tmp_path: Path, named: Any, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        files(project(tmp_path, text, **named))
    assert said in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert refused.value.exit_code == 2


def test_secrets_of_the_environment_are_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_STORES__ONLINE", "rediss://someone:hunter2@redis.example.com:6390")
    content = files(project(tmp_path))
    assert not any(b"hunter2" in one or b"redis.example.com" in one for one in content.values())
    ports = read(content)["base/serving/network.yaml"]["spec"]["egress"][0]["ports"]
    assert [entry["port"] for entry in ports] == [6390]


def placed() -> Iterator[tuple[Any, str, object]]:
    """Profiles, and their settings that no student and no package depends on."""
    for name in ("give_way", "framework", "accelerator", "nodes", "per_node", "interconnect", "memory_mb",
                 "parallel", "wait_seconds", "script"):  # fmt: skip
        yield TrainingProfile(), name, "other"
    for name in ("batch", "probation_seconds", "replicas_min", "replicas_max", "target_utilization"):
        yield ServingProfile(), name, 7
    yield ServingProfile(), "device", "cuda"


def test_the_size_of_a_fleet_makes_nothing_stale() -> None:
    sorted_out = list(placed())
    assert TrainingProfile(shard=True).identity() == {**TrainingProfile().identity(), "shard": True}
    for profile, name, value in sorted_out:
        assert replace(profile, **{name: value}).identity() == profile.identity()
    for profile in (TrainingProfile(), ServingProfile()):
        names = {name for one, name, _ in sorted_out if type(one) is type(profile)} | {"shard"}
        assert {field.name for field in fields(profile)} - names == profile.identity().keys()
