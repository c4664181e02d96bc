"""Recorded texts written again: the same where nothing was disturbed, and a cause where something was."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pyarrow.dataset as ds
import pytest

from isthmus.distill.export.causal import export
from isthmus.distill.language.decoding import DecodingSettings
from isthmus.features import clock
from isthmus.features.errors import RequestError
from isthmus.features.profiles import ServingProfile
from isthmus.orchestration.attribution.explain import explain
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import collect
from isthmus.orchestration.recording.replay import replay
from isthmus.orchestration.recording.served import Cause
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.orchestration.server.collect import collect as collect_pushes
from isthmus.package.manifest import package_digest
from isthmus.package.verdict import FeatureVerdict, Verdict
from isthmus.serving.recorder.batch import ANSWER, AnswerGroup
from isthmus.serving.rollout.releases import deploy
from tests.distill.decoder.support import origin, tiny
from tests.orchestration.recording.test_replay import (
    DAY,
    MINUTE,
    altered,
    customers,
    looked_up,
    only,
    package_of,
)
from tests.orchestration.server.served import served
from tests.orchestration.server.test_collect import pushed
from tests.orchestration.shop import Open, Shop
from tests.serving.tensors import make_drawing_package
from tests.tokenizing import trained

SERVICE = "late_order_server"
TEMPLATE = (
    "<|be-gin|>{customer_orders__orders_7d} orders, late {customer_orders__late_rate_7d}, mean "
    "{customer_orders__mean_amount_7d}, member {customer_facts__member}\n{prompt}<|end|>"
)


def written(folder: Path, project: Project, template: str = TEMPLATE, **changes: Any) -> Path:
    """A package whose texts never end by themselves."""
    settings = DecodingSettings(
        prompts=("Return",), features=dict.fromkeys(_named(template), "3"), template=template, most=40,
        golden_tokens=4, precisions=("fp32",), formats=("ort",),
    )  # fmt: skip
    made = origin(project.applied(), SERVICE)
    return export(tiny(**changes), trained(), folder, origin=made, settings=settings).path


def _named(template: str) -> list[str]:
    return [part.partition("}")[0] for part in template.split("{")[1:] if not part.startswith("prompt")]


def put(project: Project, package: Path) -> None:
    contract = project.applied()
    features: dict[str, dict[str, FeatureVerdict]] = {}
    service = contract.service(SERVICE)
    for view, feature in (*service.features, *service.computed):
        features.setdefault(view, {})[feature] = FeatureVerdict(10, 0, 0.0)
    tables = dict.fromkeys(features, "f00d")
    verdict = Verdict(
        contract.hash, project.now(), dict(features), tables, {}, package_digest(package), FeatureVerdict(10, 0, 0.0)
    )
    profile = ServingProfile(precision="fp32", probation_seconds=0)
    deploy(package, verdict, contract, profile, project.deployment_file, tables=tables, at=project.now())


def text_of(http: httpx.Client, customer: int, most: int = 12, prompt: str = "Return the sum") -> str:
    body = {"prompt": prompt, "entities": {"customer": [customer]}, "max_tokens": most}
    answer = http.post("/generate", json=body)
    assert "event: end" in answer.text, answer.text
    identity: str = answer.headers["isthmus-answer"]
    return identity


def test_texts_are_the_same_and_what_is_not_has_a_cause(built: Shop, project: Open, tmp_path: Path) -> None:
    built.append('\n[server.record]\nprivate = ["customer_orders"]\n', "isthmus.toml")
    opened = project(built)
    one, two, three, *_ = customers(opened)
    now = opened.now()
    put(opened, written(tmp_path / "packages", opened))
    with served(opened, model=True) as http:
        same, said, fed, late = (text_of(http, customer) for customer in (one, two, two, three))
        nobody = text_of(http, -77)
        looked_up(http, [one])
        pushed(http, [three], now - 5 * MINUTE, now - 2 * MINUTE, 78, to="offline")
        collect_pushes(opened)

    def alter(group: AnswerGroup) -> AnswerGroup:
        if group.route != "generate":
            return group
        names = [f"{number:x}" for number in np.frombuffer(group.answers, ANSWER)["sequence"].tolist()]
        digest, outputs = np.frombuffer(group.digest, np.uint64).copy(), np.frombuffer(group.outputs, "<f4").copy()
        digest[[names.index(identity.partition("-")[2]) for identity in (said, fed)]] ^= 1
        outputs[2 * names.index(fed.partition("-")[2])] += 1
        return msgspec.structs.replace(group, digest=digest.tobytes(), outputs=outputs.tobytes())

    altered(opened, alter)
    assert collect(opened).answers == 6
    rows = RecordedAnswers.of(opened).read(ds.field("route") == "generate").to_pylist()
    assert [row["rows"] for row in rows] == [1] * 5
    assert {len(json.loads(row["request"])["entities"]["customer"][0]) for row in rows} == {32}, "a hash"
    shown: list[str] = []
    report = replay(
        opened, first=clock.moment(now - DAY), end=clock.moment(now + DAY), progress=lambda text, _: shown.append(text)
    )
    assert (report.answers, report.same) == (6, 2)
    found = {difference.id: (difference.cause, difference.found) for difference in report.differences}
    assert found.keys() == {said, fed, late, nobody}
    assert found[late][0] == Cause.LATE
    assert found[nobody][0] == Cause.KEY
    assert found[said][0] == found[fed][0] == Cause.ENGINE
    assert "the 12 tokens of its text differ: by isthmus " in found[said][1]
    assert "tokenizers " in found[said][1]
    assert " tokens, and had " in found[fed][1]
    assert shown.count("regenerating texts") == 3
    with pytest.raises(RequestError, match="is a text and has no score"):
        explain(opened, same)

    # Another package, instead of the one that answered.
    home = tmp_path / "others"
    other = written(home, opened, initializer_range=0.1)
    assert replay(opened, same, package=package_of(opened)).same == 1
    assert "writes a different text" in only(replay(opened, same, package=other), Cause.PACKAGE)
    elsewhere = written(home, opened, "{customer_facts__member} {prompt}")
    assert "reads customer_facts, not customer_facts, customer_orders" in only(
        replay(opened, same, package=elsewhere), Cause.PACKAGE
    )
    assert only(replay(opened, same, package=make_drawing_package(home / "drawing")), Cause.PACKAGE)
    shutil.rmtree(package_of(opened))
    assert "is gone" in only(replay(opened, same), Cause.PACKAGE)
