"""Models of tensors one after the other, and beside each other."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import helper

from isthmus.features.types import Float64
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import TensorInfo, package_digest
from isthmus.serving.limits import Limits
from isthmus.serving.rollout.releases import full_history
from isthmus.serving.rollout.trial import FAILURES
from tests.serving.support import CONTRACT, Server, make_package, serving, wait
from tests.serving.tensors import (
    answered,
    as_binary,
    as_json,
    frames,
    make_counting_package,
    make_drawing_package,
    make_tensor_package,
    session,
)

INFER = "/v2/models/late/infer"
SHORT = 5
"""Words of a smaller vocabulary."""


@contextmanager
def server_without_store(folder: Path, **settings: Any) -> Iterator[Server]:
    """Tensors need no Redis."""
    folder.mkdir()
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, "redis://127.0.0.1:1", **settings) as server:
        yield server


def make(folder: Path, **options: Any) -> tuple[Path, str]:
    package = make_drawing_package(folder, name="late", **options)
    return package, package_digest(package)


def ask(server: Server, fed: Feeds, path: str = INFER) -> tuple[str, Feeds]:
    """The package that answered, and its outputs."""
    answer = server.http.post(path, json=as_json(fed))
    return answer.json()["model_version"], answered(answer)


def model(server: Server) -> dict[str, Any]:
    models: list[dict[str, Any]] = server.http.get("/models").json()["models"]
    return models[0] if models else {"package": ""}


def put(server: Server, package: Path, **how: Any) -> None:
    server.deploy(package, **how)
    digest = package_digest(package)
    wait(lambda: digest in (model(server)["package"], model(server).get("candidate", {}).get("package")), "the model")


def expected(package: Path, fed: Feeds) -> Feeds:
    return dict(zip(["image", "vector"], session(package).run(["image", "vector"], fed), strict=True))


def test_candidates_are_compared_answer_a_share_and_are_given_up(tmp_path: Path) -> None:
    first, deployed = make(tmp_path / "first")
    same, shadow = make(tmp_path / "same", weight=2.0 + 1e-5)
    smaller, canary = make(tmp_path / "smaller", words=SHORT)
    zero, blank = make(tmp_path / "zero", weight=0.0)
    fed = frames(1, words=SHORT)
    beyond: Feeds = {**fed, "ids": np.full((1, 1), SHORT, np.int64)}
    infinite: Feeds = {**fed, "frame": np.full((1, 3, 4, 4), np.inf, np.float32)}
    with server_without_store(tmp_path / "server") as server:
        put(server, first)
        put(server, same, share=0.0)
        assert [ask(server, fed)[0] for _ in range(5)] == [deployed] * 5
        wait(lambda: model(server)["candidate"]["tried"]["requests"] == 5, "the shadow")
        tried = model(server)["candidate"]
        assert (tried["compared"], tried["differing"]) == (5 * (48 + 2), 0)
        assert 0 < tried["worst"] < tried["tolerance"]
        # Either can be asked for by name.
        assert server.http.get("/v2/models/late").json()["versions"] == [deployed, shadow]
        version, found = ask(server, fed, f"/v2/models/late/versions/{shadow}/infer")
        assert version == shadow
        assert found["image"].tobytes() == expected(same, fed)["image"].tobytes()

        put(server, smaller, share=0.999)
        assert ask(server, fed)[0] == canary
        content, headers = as_binary(fed)

        def slowly() -> Iterator[bytes]:
            yield content[:10]
            assert {ask(server, beyond)[0] for _ in range(FAILURES)} == {deployed}
            assert f"{FAILURES} of " in model(server)["candidate"]["refused"]
            yield content[10:]

        # It was there when the request for it came in.
        with httpx.Client(base_url=server.http.base_url) as http:
            late = http.post(f"/v2/models/late/versions/{canary}/infer", content=slowly(), headers=headers)
        assert late.json()["model_version"] == canary
        assert ask(server, fed)[0] == deployed

        put(server, zero, share=0.999)
        assert {ask(server, infinite)[0] for _ in range(FAILURES)} == {deployed}, "it has NaN where there was Infinity"
        assert f"{FAILURES} of {FAILURES}" in model(server)["candidate"]["refused"]
        refused = server.http.post(f"/v2/models/late/versions/{blank}/infer", json=as_json(fed))
        assert (refused.status_code, refused.json()["expected"]) == (404, deployed)


def test_a_deployment_that_fails_is_undone_and_one_of_another_kind_has_time(tmp_path: Path) -> None:
    rows = make_package(tmp_path / "rows", inputs=[("distance", Float64)])
    first, deployed = make(tmp_path / "first")
    smaller, failing = make(tmp_path / "smaller", words=SHORT)
    fed = frames(1, words=SHORT)
    beyond: Feeds = {**fed, "ids": np.full((1, 1), SHORT, np.int64)}
    with server_without_store(tmp_path / "server") as server:
        put(server, rows)
        put(server, first, probation=3600.0)
        # Those who ask for rows have the time of probation to follow.
        assert server.predict(request={"distance": [1.0]}).json()["package"] == package_digest(rows)
        assert ask(server, fed)[0] == deployed
        assert model(server)["probation"]["refused"] is None

        put(server, smaller, probation=3600.0)
        assert server.predict(request={"distance": [1.0]}).status_code == 422
        assert ask(server, fed)[0] == failing
        assert {ask(server, beyond)[0] for _ in range(FAILURES)} == {deployed}
        assert ask(server, fed)[0] == deployed
        wait(lambda: model(server)["package"] == deployed, "the way back")
        assert full_history(server.deployment)[-1].action == "rollback"
        assert ask(server, fed)[1]["image"].tobytes() == expected(first, fed)["image"].tobytes()


def test_a_shadow_that_does_not_end_is_ended(tmp_path: Path) -> None:
    quick = make_tensor_package(
        tmp_path / "quick", [helper.make_node("Identity", ["steps"], ["counted"])],
        [TensorInfo("steps", "int64", (1,))], [TensorInfo("counted", "int64", (1,))],
        [{"steps": np.array([3], np.int64)}], name="late",
    )  # fmt: skip
    endless = make_counting_package(tmp_path / "endless", name="late")
    with server_without_store(tmp_path / "server", limits=Limits(deadline_seconds=0.3)) as server:
        put(server, quick)
        put(server, endless, share=0.0)
        for _ in range(2):
            assert ask(server, {"steps": np.array([2**62], np.int64)})[0] == package_digest(quick)
        wait(lambda: model(server)["candidate"]["tried"]["failures"] == 2, "the shadow to be ended")
        processor = Path(f"/proc/{server.process.pid}/stat")
        before = sum(map(int, processor.read_text().rpartition(")")[2].split()[11:13]))
        time.sleep(0.5)
        after = sum(map(int, processor.read_text().rpartition(")")[2].split()[11:13]))
        assert after - before < 20, "hundredths of a second"


@pytest.mark.accept
def test_no_request_is_lost_or_mixed_while_models_are_swapped(tmp_path: Path) -> None:
    packages = [make(tmp_path / f"package {weight}", weight=weight) for weight in (2.0, 3.0)]
    fed = frames(3)
    wanted = {digest: expected(package, fed) for package, digest in packages}
    content, headers = as_binary(fed, parameters={"binary_data_output": True})
    versions: set[str] = set()
    with server_without_store(tmp_path / "server") as server:
        put(server, packages[0][0])
        end = time.monotonic() + 60

        def load(number: int) -> int:
            count = 0
            with httpx.Client(base_url=server.http.base_url, timeout=10) as http:
                while time.monotonic() < end:
                    answer = (
                        http.post(INFER, content=content, headers=headers)
                        if (count + number) % 2
                        else http.post(INFER, json=as_json(fed))
                    )
                    found = answered(answer)
                    (version,) = [digest for digest in wanted if digest.encode() in answer.content]
                    versions.add(version)
                    for name, array in wanted[version].items():
                        assert found[name].tobytes() == array.tobytes()
                    count += 1
            return count

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(load, number) for number in range(4)]
            for swap in range(20):
                put(server, packages[(swap + 1) % 2][0])
            end = time.monotonic()
            asked = sum(task.result() for task in running)
    assert versions == wanted.keys()
    assert asked > 200
