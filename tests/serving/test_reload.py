from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.features.files import write_atomically
from isthmus.features.types import Int64
from tests.serving.support import CONTRACT, EVERYTHING, PUNCTUALITY, ROUTE, contract_of, make_package, serving, wait

OTHER = contract_of(PUNCTUALITY, EVERYTHING, ROUTE, request=())
ASKED: dict[str, Any] = {"features": ["punctuality:flights"], "entities": {"carrier": ["B6"]}}


def test_contract_and_deployment_are_taken_up_while_the_server_runs(tmp_path: Path, redis_url: str) -> None:
    inputs = [("punctuality__flights", Int64)]
    first = make_package(tmp_path / "first", inputs=inputs, weight=0.1)
    second = make_package(tmp_path / "second", inputs=inputs, weight=-0.1)
    third = make_package(tmp_path / "third", OTHER, inputs=inputs)
    with serving(tmp_path / "server", redis_url) as server:
        assert server.http.get("/healthz").json() == {"status": "up"}
        ready = server.http.get("/readyz")
        assert ready.status_code == 503
        assert ready.headers["retry-after"] == "1"
        assert "isthmus apply" in ready.json()["remedy"]
        assert server.lookup(**ASKED).status_code == 503
        assert server.http.get("/models").json() == {"models": [], "refused": None}

        write_atomically(server.contract, b"{")
        wait(lambda: "is not a contract" in server.http.get("/readyz").json()["found"], "the broken contract")
        write_atomically(server.contract, CONTRACT.dumps())
        wait(lambda: server.http.get("/readyz").status_code == 200, "the contract")
        assert server.http.get("/readyz").json() == {
            "status": "ready", "project": "flights", "contract": CONTRACT.hash, "model": None,
        }  # fmt: skip
        assert server.lookup(**ASKED).json()["results"][1]["values"] == [7]
        missing = server.predict(entities={"carrier": ["B6"]})
        assert (missing.status_code, missing.json()["error"]) == (503, "NotReadyError")
        assert "isthmus deploy" in missing.json()["remedy"]

        def predicted() -> float:
            answer = server.predict(entities={"carrier": ["B6"]})
            return float(answer.json()["predictions"][0]) if answer.status_code == 200 else -1.0

        server.deploy(first)
        wait(lambda: predicted() > 0.6, "the first model")
        server.deploy(second)
        wait(lambda: 0 < predicted() < 0.4, "the second model")

        write_atomically(server.deployment, b"{}")
        write_atomically(server.contract, CONTRACT.dumps()[:-3])
        wait(lambda: sum(line["event"] == "file refused" for line in server.lines()) == 3, "both refusals in the log")
        assert predicted() < 0.4
        listed = server.http.get("/models").json()
        assert "is not a deployment" in listed["refused"]
        assert len(listed["models"]) == 1
        assert server.lookup(**ASKED).headers["isthmus-contract"] == CONTRACT.hash

        write_atomically(server.contract, OTHER.dumps())
        wait(lambda: server.http.get("/readyz").json()["contract"] == OTHER.hash, "the other contract")
        assert server.lookup(**ASKED).json()["metadata"]["contract"] == OTHER.hash
        old = server.predict(entities={"carrier": ["B6"]})
        assert (old.status_code, old.json()["error"]) == (409, "ContractMismatch")
        assert server.http.get("/models").json()["models"][0]["current"] is False
        server.deploy(third, OTHER)
        wait(lambda: predicted() > 0.9, "the third model")

        server.deployment.unlink()
        wait(lambda: server.predict(entities={"carrier": ["B6"]}).status_code == 503, "the model to be gone")


def test_rows_of_another_contract_are_refused(tmp_path: Path, redis_url: str) -> None:
    changed = contract_of(replace(PUNCTUALITY, code="other code"), EVERYTHING, ROUTE)
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "contract.json").write_bytes(changed.dumps())
    with serving(folder, redis_url) as server:
        answer = server.lookup(**ASKED)
        assert (answer.status_code, answer.json()["error"]) == (409, "ContractMismatch")
        assert "isthmus materialize" in answer.json()["remedy"]
        assert server.lookup(features=["everything:b"], entities={"flight": [1]}).status_code == 200
