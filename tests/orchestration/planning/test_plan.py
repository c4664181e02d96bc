"""`isthmus infra plan`: the roofline, the catalog of devices, the work of a graph, and all of it for a project."""

import copy
import hashlib
import json
import math
import shutil
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, load_model_from_string, numpy_helper

from isthmus.distill.decoder.probes import Speed
from isthmus.distill.decoder.work import Sizes
from isthmus.distill.export.package import contents, write_package
from isthmus.distill.onnx.cost import graph_work, weight_bytes
from isthmus.distill.onnx.runtime import ask, ort_format, session, tensor_info
from isthmus.features.document.blocks import Paragraph, TableBlock
from isthmus.features.errors import ConfigurationError, DataError, GateFailed
from isthmus.features.profiles import ServingProfile
from isthmus.orchestration.cli.screens.plan import plan_blocks
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.planning.devices import Device, Peak, Precision, catalog, measure_host
from isthmus.orchestration.planning.plan import plan
from isthmus.orchestration.planning.roofline import Work, roofline, rows_to_ridge
from isthmus.orchestration.planning.tokenrate import TextModel
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.set import training_set
from isthmus.package.golden import Golden, GoldenCase, TensorBytes
from isthmus.package.manifest import FORMAT_VERSION, Manifest, Variant
from tests.commandline import run
from tests.distill.packages import contract
from tests.distill.samplereports import report
from tests.orchestration.cli.test_cli import refused
from tests.orchestration.shop import Open, Shop

ROOMY = {"kind": "cpu", "title": "a device", "memory": 1e12, "source": "the test"}
POSITIVE = st.floats(1e-3, 1e15)


def device(fp32: float, bandwidth: float, **more: Any) -> Device:
    peak = Peak(fp32=fp32, **more.pop("peak", {}))
    return Device(**{**ROOMY, "peak": peak, "bandwidth": bandwidth, **more})


# --- the roofline


@given(POSITIVE, POSITIVE, POSITIVE, POSITIVE, st.integers(1, 10**6), st.floats(0, 10))
def test_the_roofline_is_that_of_the_paper(
    flops: float, moved: float, peak: float, bandwidth: float, calls: int, overhead: float
) -> None:
    work = Work(flops, moved, calls)
    found = roofline(work, device(peak, bandwidth), "fp32", overhead)
    assert found is not None
    # The paper's own form: attainable operations a second are the lesser of peak and bandwidth times intensity.
    attainable = min(peak, bandwidth * work.intensity)
    assert math.isclose(found.least, flops / attainable, rel_tol=1e-9)
    assert math.isclose(found.seconds, flops / attainable + calls * overhead, rel_tol=1e-9)
    if found.overhead <= found.least and not math.isclose(work.intensity, found.ridge, rel_tol=1e-9):
        assert found.bound == ("compute" if work.intensity > found.ridge else "bandwidth")
    assert (found.bound == "overhead") == (found.overhead > found.least)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**4), st.floats(0.01, 1000))
def test_the_batch_that_reaches_the_ridge_is_the_first(flops: int, fixed: int, each: int, ridge: float) -> None:
    def intensity(rows: int) -> float:
        return rows * flops / (fixed + rows * each)

    rows = rows_to_ridge(flops, fixed, each, ridge)
    if rows is None:
        assert each > 0
        assert flops / each <= ridge * (1 + 1e-9)
        return
    assert intensity(rows) >= ridge * (1 - 1e-9)
    assert rows == 1 or intensity(rows - 1) < ridge * (1 + 1e-9)


def test_a_precision_that_a_device_lacks() -> None:
    work, plain = Work(100.0, 10.0), device(10.0, 1.0)
    assert roofline(work, plain, "bf16") is None
    int8, own = roofline(work, plain, "int8"), roofline(work, device(10.0, 1.0, peak={"int8": 40.0}), "int8")
    assert int8 is not None
    assert own is not None
    assert (int8.compute, own.compute) == (10.0, 2.5)


def test_threads_have_their_part_of_a_cpu_and_all_of_a_gpu() -> None:
    whole = device(8.0, 4.0, cores=4, peak={"int8": 16.0})
    part = whole.part(1)
    assert (part.peak, part.bandwidth, part.cores) == (Peak(fp32=2.0, int8=4.0), 1.0, 1)
    assert whole.part(2).peak.fp32 == 4.0
    assert whole.part(9) is whole
    gpu = device(8.0, 4.0, cores=4, kind="cuda")
    assert gpu.part(1) is gpu


def test_this_host_is_measured() -> None:
    here = measure_host(1)
    assert 1e8 < here.peak.fp32 < 1e14
    assert 1e7 < here.bandwidth < 1e13
    assert here.memory > 1e8
    assert "1 of " in here.title


# --- the catalog


def test_what_comes_with_isthmus_has_figures_and_sources(tmp_path: Path) -> None:
    known = catalog(tmp_path, ["cpu", "cuda", "h100-sxm"])
    assert {one.kind for one in known.values()} == {"cpu", "cuda"}
    assert all(one.source.startswith("https://") and one.watts for one in known.values())
    h100 = known["h100-sxm"]
    assert (h100.peak.fp32, h100.bandwidth, h100.memory) == (67e12, 3.35e12, 80e9)
    assert set(known) == set(
        tomllib.loads(files("isthmus.orchestration.planning").joinpath("devices.toml").read_text())
    )


OWN = """
[l4]
kind = "cuda"
title = "An L4 that was measured"
peak = {{ fp32 = 20e12 }}
bandwidth = {bandwidth}
memory = 24e9
source = "our lab"
"""


def test_a_projects_devices_come_before(tmp_path: Path) -> None:
    (tmp_path / "devices.toml").write_text(OWN.format(bandwidth="250e9") + OWN.format(bandwidth=1).replace("l4", "l5"))
    known = catalog(tmp_path, ["l5"])
    assert (known["l4"].bandwidth, known["l4"].peak.bf16, known["l5"].bandwidth) == (250e9, None, 1.0)
    assert known["t4"].peak.int8 == 130e12


def test_every_wrong_figure_is_told_at_once(tmp_path: Path) -> None:
    wrong = (
        OWN.format(bandwidth=-1)
        + OWN.format(bandwidth='"fast"').replace("l4", "b").replace("memory = 24e9\n", "watt = 3\n")
        + OWN.format(bandwidth=1).replace("l4", "cpu")
        + OWN.format(bandwidth=1).replace("l4", "c").replace("fp32 = 20e12", "bf16 = inf")
    )
    (tmp_path / "devices.toml").write_text(wrong)
    with pytest.raises(ConfigurationError) as caught:
        catalog(tmp_path, ["cpu", "l4", "b", "l40"])
    told = {problem.where: f"{problem.found}; {problem.expected}" for problem in caught.value.problems}
    assert {where: told[where].partition(":")[0][:36] for where in told} == {
        "devices.toml: l4.bandwidth": "-1; greater than 0",
        "devices.toml: b.bandwidth": "'fast'; a valid number",
        "devices.toml: b.memory": "is missing; a value",
        "devices.toml: b.watt": "is not a setting of a device; one of",
        "devices.toml: cpu": "is not a valid name; lower-case lett",
        "devices.toml: c.peak.fp32": "is missing; a value",
        "devices.toml: c.peak.bf16": "inf; a finite number",
        "prices.hour.l40": "is not a device; one of a10, a100-sx",
    }


def test_a_catalog_that_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "devices.toml").write_text("[l4\n")
    with pytest.raises(ConfigurationError, match=r"devices.toml: TOML syntax: "):
        catalog(tmp_path, [])


# --- the work of a graph


def weights(name: str, *shape: int) -> TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def graph(nodes: list[Any], takes: list[int | str], constants: list[TensorProto], gives: int = 2) -> bytes:
    made = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info("x", TensorProto.FLOAT, takes)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"] + [None] * (gives - 1))], constants,
    )  # fmt: skip
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return bytes(model.SerializeToString())


def mlp(inputs: int = 4, hidden: int = 8) -> bytes:
    nodes = [
        helper.make_node("Gemm", ["x", "a", "b"], ["h"], transB=1), helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "c"], ["y"]),
    ]  # fmt: skip
    constants = [weights("a", hidden, inputs), weights("b", hidden), weights("c", hidden, 1)]
    return graph(nodes, ["n", inputs], constants)


def test_the_work_of_a_network_is_that_by_hand() -> None:
    found = graph_work(mlp(4, 8), {})
    assert found.flops == 2 * 4 * 8 + 2 * 8 * 1
    assert found.weights == 4 * (4 * 8 + 8 + 8)
    assert found.values == 4 * (4 + 1)
    assert found.activations == 8 + 1
    assert found.uncounted == ()


def test_the_work_of_convolutions_is_that_by_hand() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["h"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["h", "b"], ["d"], group=6, pads=[1, 1, 1, 1]),
        helper.make_node("ConvTranspose", ["d", "c"], ["y"], strides=[2, 2]),
    ]
    model = graph(
        nodes, ["n", 3, "height", "width"], [weights("a", 6, 3, 3, 3), weights("b", 6, 1, 3, 3),
                                            weights("c", 6, 2, 2, 2)], 4,
    )  # fmt: skip
    found = graph_work(model, {"x": (5, 3, 8, 12)})
    first = 2 * (6 * 4 * 6) * (3 * 3 * 3)
    depthwise = 2 * (6 * 4 * 6) * (3 * 3)
    transposed = 2 * (6 * 4 * 6) * (2 * 2 * 2)
    assert found.flops == first + depthwise + transposed
    assert found.values == 4 * (3 * 8 * 12 + 2 * 8 * 12)


def test_rows_may_be_the_last_size_of_an_input() -> None:
    nodes = [helper.make_node("Transpose", ["x"], ["t"]), helper.make_node("MatMul", ["t", "a"], ["y"])]
    found = graph_work(graph(nodes, [4, "n"], [weights("a", 4, 2)]), {"x": (4, 32)})
    assert (found.flops, found.values) == (2 * 4 * 2, 4 * (4 + 2))


def test_what_is_not_counted_is_said() -> None:
    nodes = [helper.make_node("Einsum", ["x", "a"], ["y"], equation="ni,io->no")]
    assert graph_work(graph(nodes, ["n", 4], [weights("a", 4, 2)]), {}).uncounted == ("Einsum",)


# --- decoding


SIZES = Sizes(640, 64, 2, 4, 2, 16, 128, tied=True)
TEXT = TextModel(
    SIZES, 384, {"fp32": ["model.fp32.onnx", "model.fp32.ort"], "int4": ["model.int4.ort"]}, ["model.fp32.pte"],
    ("int4", 60e-6),
)  # fmt: skip


def probed(sizes: Sizes, precision: str, threads: int, prompt: int) -> Speed:
    assert (sizes, threads, prompt) == (SIZES, 2, 384)
    slow = 1e-10 if precision == "fp32" else 1e-8
    return Speed(
        sizes, "fp32" if precision == "fp32" else "int4", byte=slow, operation=1e-9, head=1e-6, launch=1e-6, node=1e-8,
        number=1e-12, prompt_number=1e-11, reading=2e-6,
    )  # fmt: skip


def test_tokens_a_second_are_those_by_hand() -> None:
    devices = {
        "this host": device(1e10, 1e10, cores=2), "a server": device(32e9, 16e10, cores=16),
        "a gpu": device(1e13, 1e12, kind="cuda"),
    }  # fmt: skip
    found = TEXT.plan(devices, 2, probed)
    assert found["prompt"] == 384
    assert found["left_out"] == {
        "a gpu": "the serving runtime needs a CPU", "model.fp32.pte": "its runtime is not measured",
    }  # fmt: skip
    assert {name: part["files"] for name, part in found["precisions"].items()} == TEXT.files
    plain, small = (found["precisions"][name] for name in ("fp32", "int4"))
    weights = SIZES.layer_bytes("fp32") + SIZES.head_bytes("fp32")
    cache = 4 * 2 * 2 * 2 * 16
    assert (plain["decode"]["bytes"], plain["decode"]["flops"]) == (weights + 384 * cache, SIZES.flops(1, 384))
    # The prompt is read in two parts, and the weights with each.
    assert (plain["prefill"]["bytes"], plain["prefill"]["calls"]) == (2 * weights + 256 * cache, 2)
    assert plain["prefill"]["flops"] == SIZES.flops(256, 0) + SIZES.flops(128, 256)

    speed = probed(SIZES, "fp32", 2, 384)
    here, there = (plain["decode"]["devices"][name] for name in ("this host", "a server"))
    step = speed.call(1, 384)
    assert math.isclose(here["seconds"], step.seconds + 2e-6)
    assert math.isclose(here["tokens_per_second"], 1 / here["seconds"])
    assert (here["least_seconds"], here["bound"]) == (step.products, "bandwidth")
    # Two of its sixteen cores, and the overhead of this host.
    assert math.isclose(there["least_seconds"], max(SIZES.flops(1, 384) / 4e9, (weights + 384 * cache) / 2e10))
    assert math.isclose(there["overhead_seconds"], step.overhead + 2e-6)
    read = plain["prefill"]["devices"]["this host"]
    assert math.isclose(read["tokens_per_second"], 384 / speed.prompt(384).seconds)
    assert read["bound"] == "compute"

    # Memory explains little of it: what unpacks the weights is arithmetic.
    assert small["decode"]["devices"]["this host"]["bound"] == "compute"
    expected = probed(SIZES, "int4", 2, 384).call(1, 384).seconds
    assert plain["check"] is None
    assert small["check"] == {"measured_seconds": 60e-6, "seconds": expected, "ratio": 60e-6 / expected}


def test_a_model_that_hardly_computes_is_bound_by_overhead() -> None:
    def idle(sizes: Sizes, precision: str, threads: int, prompt: int) -> Speed:
        return replace(probed(sizes, precision, threads, prompt), node=1e-5, operation=1e-12)

    found = TEXT.plan({"this host": device(1e12, 1e12, cores=2)}, 2, idle)["precisions"]["fp32"]
    assert {found[part]["devices"]["this host"]["bound"] for part in ("prefill", "decode")} == {"overhead"}


# --- a project


SIZE = 64


def made(shop: Shop, **serving: Any) -> Project:
    """A project with a student and its package, the graphs of which were written by hand, and a report of them."""
    told = copy.deepcopy(report()) | {"id": "5f0c2a9be1d4", "name": "late_order", "measures": {}}
    half = told.pop("serving") | serving
    student = shop.state / "models" / "late_order" / told["id"]
    student.mkdir(parents=True)
    (student / "report.json").write_text(json.dumps(told))
    (student.parent / "latest").write_text(told["id"])
    source = mlp(4, SIZE)
    models = {"model.fp32.onnx": source, "model.fp32.ort": ort_format(source)}
    fed = {"x": np.ones((2, 4), np.float32)}
    outputs = {
        file: {name: TensorBytes.of(array) for name, array in ask(opened, fed).items()}
        for file, opened in ((file, session(data, 1)) for file, data in models.items())
    }
    variants = tuple(
        Variant(
            file,
            "fp32",
            "onnx" if file.endswith("x") else "ort",
            len(data),
            hashlib.sha256(data).hexdigest(),
            0.0,
            0.0,
            {},
        )
        for file, data in models.items()
    )
    tensors, own = load_model_from_string(source).graph, contract()
    manifest = Manifest(
        FORMAT_VERSION, "late_order", own.hash, "features", told["id"], "none", "tests:Graph", "none", (),
        tuple(map(tensor_info, tensors.input)), tuple(map(tensor_info, tensors.output)), variants, {},
    )  # fmt: skip
    case = GoldenCase({name: TensorBytes.of(array) for name, array in fed.items()}, outputs)
    package = write_package(
        shop.state / "packages", "late_order", contents(manifest, json.loads(own.dumps()), Golden((), (case,)), models)
    )
    (shop.state / "packages" / "late_order.latest").write_text(package.name)
    (shop.state / "serving").mkdir()
    (shop.state / "serving" / f"{package.name}.json").write_text(json.dumps({**half, "precision": "fp32", **serving}))
    chosen = "smallest" if "precision" in serving else "fp32"
    shop.append(f'\n[profiles.serving]\nprecision = "{chosen}"\nlatency_objective_ms = 1\n', "isthmus.toml")
    return Project(shop.root)


def host(threads: int) -> Device:
    return device(1e10 * threads, 1e9, cores=threads)


def test_a_plan_is_that_by_hand(shop: Shop) -> None:
    made(shop)
    shop.append('\n[prices]\ncurrency = "EUR"\nhour = { cpu = 0.1, grace-superchip = 4, t4 = 0.5, l4 = 0.8 }\n',
                "isthmus.toml")  # fmt: skip
    found = plan(Project(shop.root), speed=host)["models"]["late_order"]

    assert found["decoding"] is None
    training, half = found["training"], report()["training"]
    moved = 1790 * 2881 * 40 + 228907 * (2 * 4 * 5 + 5 * 4 * (SIZE + 1))
    assert (training["flops"], training["bytes"]) == (1.2e11, moved)
    least = max(1.2e11 / 2e10, moved / 1e9)
    assert training["check"]["least_seconds"] == least == 6.0
    overhead = (half["seconds"] - least) / 1790
    assert math.isclose(training["check"]["overhead_us"], overhead * 1e6)
    assert "overhead: each call costs 11.2 ms in addition to its 67 MFLOP" in training["check"]["why"]
    here = training["devices"]["this host"]
    assert math.isclose(here["seconds"], half["seconds"])
    assert math.isclose(here["cost"], 0.1 * half["seconds"] / 3600)
    t4 = training["devices"]["t4"]
    assert math.isclose(t4["seconds"], max(1.2e11 / 8.1e12, moved / 300e9) + 1790 * overhead)
    assert t4["bound"] == "overhead"
    priced = {name: one["seconds"] * price for name, price in (("this host", 0.1), ("t4", 0.5), ("l4", 0.8),
              ("grace-superchip", 4)) for one in [training["devices"][name]]}  # fmt: skip
    assert training["recommended"]["cheapest"] == min(priced, key=lambda name: priced[name])
    assert training["recommended"]["by"] == "price"
    seconds = {name: one["seconds"] for name, one in training["devices"].items()}
    assert training["recommended"]["fastest"] == min(seconds, key=lambda name: seconds[name])

    serving = found["serving"]
    read = 4 * (4 * SIZE + SIZE + SIZE) + 4 * (4 + 1) + 2 * 4 * (SIZE + 1)
    assert (serving["flops"], serving["bytes"]) == (2 * 4 * SIZE + 2 * SIZE, read)
    assert set(serving["devices"]) == {"this host", "grace-superchip", "epyc-9654"}
    here = serving["devices"]["this host"]
    assert math.isclose(here["least_seconds"], read / 1e9)
    assert math.isclose(here["seconds"], 42e-6)
    assert math.isclose(here["p99_ms"], 0.083)
    assert math.isclose(here["cost"], 0.1 / 3600 * 1000 * 42e-6)
    grace = serving["devices"]["grace-superchip"]
    assert math.isclose(grace["least_seconds"], read / (1e12 / 144))
    assert math.isclose(grace["requests_per_second"], 144 / grace["seconds"])
    assert serving["recommended"]["cheapest"] == min(
        ("this host", "grace-superchip"), key=lambda name: serving["devices"][name]["cost"]
    )


@pytest.mark.parametrize("precision", ["w8", "int4"])
def test_files_with_smaller_weights_compute_in_float32(shop: Shop, precision: str) -> None:
    serving = plan(made(shop, precision=precision), speed=host)["models"]["late_order"]["serving"]
    assert serving["precision"] == precision
    here = serving["devices"]["this host"]
    assert math.isclose(here["least_seconds"], serving["bytes"] / 1e9)
    assert math.isclose(here["seconds"], 42e-6)


def test_a_rate_asks_for_as_many_devices_as_keep_up(shop: Shop) -> None:
    made(shop)
    shop.append("\n[prices]\nhour = { cpu = 0.1, grace-superchip = 4 }\n", "isthmus.toml")
    serving = plan(Project(shop.root), "late_order", rate=40_000, speed=host)["models"]["late_order"]["serving"]
    here, grace = (serving["devices"][name] for name in ("this host", "grace-superchip"))
    assert here["count"] == math.ceil(40_000 * 42e-6 / ServingProfile().target_utilization) == 3
    assert (grace["count"], grace["cost_hour"]) == (1, 4.0)
    assert math.isclose(here["cost_hour"], 0.3)
    assert serving["recommended"]["cheapest"] == "this host"


def test_without_prices_time_alone_ranks(shop: Shop) -> None:
    opened = made(shop)
    found = plan(opened, speed=host)
    for half in ("training", "serving"):
        estimate = found["models"]["late_order"][half]
        assert estimate["recommended"]["by"] == "time"
        assert estimate["recommended"]["cheapest"] is None
        assert {one["cost"] for one in estimate["devices"].values()} == {None}
        # Most of it is overhead, which no device shortens.
        assert estimate["devices"]["this host"]["bound"] == "overhead"
        assert estimate["recommended"]["device"] == "this host" != estimate["recommended"]["fastest"]
    blocks = list(plan_blocks(found))
    told = "ranked by time: 77% of its time is overhead; the fastest is l40s with 20.1 s."
    assert any(isinstance(block, Paragraph) and told in str(block.text) for block in blocks)
    table = next(block for block in blocks if isinstance(block, TableBlock))
    times = [found["models"]["late_order"]["training"]["devices"][str(row[0])]["seconds"] for row in table.rows[:-1]]
    assert times == sorted(times)


def test_tokens_a_second_are_shown(shop: Shop) -> None:
    found = plan(made(shop), speed=host)
    found["models"]["late_order"]["decoding"] = decoding = TEXT.plan({"this host": host(2)}, 2, probed)
    blocks = list(plan_blocks(found))
    texts = [str(block.text) for block in blocks if isinstance(block, Paragraph)]
    assert "Decoding one text at a time, after a prompt of 384 tokens." in texts
    assert "Left out: model.fp32.pte; its runtime is not measured." in texts
    ratio = decoding["precisions"]["int4"]["check"]["ratio"]
    (told,) = (text for text in texts if text.startswith("Measured: 60 µs for a step in int4 at the last export; "))
    assert f"{ratio:.3g} times" in told
    (table,) = (block for block in blocks if isinstance(block, TableBlock) and block.columns[0] == "precision")
    step = decoding["precisions"]["fp32"]["decode"]["devices"]["this host"]
    assert table.rows[0][:2] == ["fp32", "this host"]
    assert table.rows[0][4] == f"{step['tokens_per_second']:,.0f}"
    assert [row[0] for row in table.rows] == ["fp32", "int4"]


@pytest.mark.parametrize(("prices", "by"), [("h100-sxm = 2", "time"), ("cpu = 5, h100-sxm = 2", "price")])
def test_no_gpu_is_recommended_for_work_that_is_bound_by_overhead(shop: Shop, prices: str, by: str) -> None:
    made(shop)
    shop.append(f"\n[prices]\nhour = {{ {prices} }}\n", "isthmus.toml")
    found = plan(Project(shop.root), speed=host)
    training = found["models"]["late_order"]["training"]
    assert training["devices"]["this host"]["bound"] == "overhead"
    assert (training["recommended"]["device"], training["recommended"]["by"]) == ("this host", by)
    told = "No CPU has a price, so devices are ranked by time" if by == "time" else "the cheapest"
    assert any(isinstance(block, Paragraph) and told in str(block.text) for block in plan_blocks(found))


def test_without_prices_the_smallest_of_the_fastest_devices_is_enough(shop: Shop) -> None:
    opened = made(shop)
    trained = shop.state / "models" / "late_order" / "5f0c2a9be1d4" / "report.json"
    told = json.loads(trained.read_text())
    told["training"] |= {"seconds": 7.0}
    trained.write_text(json.dumps(told))
    training = plan(opened, speed=host)["models"]["late_order"]["training"]
    seconds = {name: one["seconds"] for name, one in training["devices"].items()}
    enough = 1.1 * min(seconds.values())
    assert training["recommended"]["device"] == "t4" != training["recommended"]["fastest"]
    assert seconds["t4"] < enough < seconds["this host"]


def test_no_device_keeps_an_objective_that_this_host_breaks(shop: Shop) -> None:
    serving = plan(made(shop, p99_us=42_000), speed=host)["models"]["late_order"]["serving"]
    assert not any(one["holds"] for one in serving["devices"].values())
    assert serving["recommended"] == {"device": None, "cheapest": None, "fastest": None, "by": "time"}


def test_what_lacks_a_precision_is_left_out(shop: Shop) -> None:
    made(shop)
    shop.replace("batch = 256", 'batch = 256\nprecision = "bf16"', "isthmus.toml")
    training = plan(Project(shop.root), speed=host)["models"]["late_order"]["training"]
    assert set(training["left_out"]) == {"this host", "t4", "grace-superchip", "epyc-9654"}
    assert training["recommended"]["fastest"] == "h100-sxm"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"device": "cuda"},
            "it ran on cuda in fp32, which was not measured on this host",
        ),
        ({"seconds": 1.0}, "faster than the roofline: the data fit in caches"),
        ({"seconds": 7.0}, "explained by the arithmetic speed of this host"),
    ],
)
def test_a_check_says_why_it_differs(shop: Shop, changed: dict[str, Any], words: str) -> None:
    opened = made(shop)
    file = shop.state / "models" / "late_order" / "5f0c2a9be1d4" / "report.json"
    told = json.loads(file.read_text())
    told["training"] |= changed
    file.write_text(json.dumps(told))
    assert words in plan(opened, speed=host)["models"]["late_order"]["training"]["check"]["why"]


def test_before_there_is_anything_to_plan(shop: Shop, project: Open) -> None:
    with pytest.raises(DataError, match=r"student of late_order: not found .* Run `isthmus distill`"):
        plan(project(shop), speed=host)
    opened = made(shop)
    shop.replace("latency_objective_ms = 1", "threads = 2", "isthmus.toml")
    with pytest.raises(GateFailed, match="serving was measured with threads 1; expected threads 2"):
        plan(project(shop), speed=host)
    shutil.rmtree(shop.state / "serving")
    with pytest.raises(GateFailed, match="the serving half is missing"):
        plan(opened, speed=host)
    shutil.rmtree(shop.state / "packages")
    with pytest.raises(DataError, match=r"package of late_order: not found .* Run `isthmus model export`"):
        plan(opened, speed=host)


@pytest.mark.accept
def test_the_command_line(shop: Shop) -> None:
    made(shop)
    shop.append('\n[prices]\ncurrency = "EUR"\nhour = { cpu = 0.1, t4 = 0.5 }\n', "isthmus.toml")
    shown = run("infra", "plan", "late_order", "--rate", "100", cwd=shop.root)
    assert shown.returncode == 0, shown.stderr
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "Training, 1,790 steps in fp32: 120 GFLOP, 513 MB, 234 FLOP/B." in lines
    assert [line for line in lines if line.startswith("Recommended: this host")]
    assert [line for line in lines if line.startswith("Measured: 42 µs for one row at the last export; ")]
    assert "Left out: h100-sxm, a100-sxm-80gb, l40s, l4, a10, t4; the serving runtime needs a CPU." in lines
    told = run("infra", "plan", "--json", cwd=shop.root)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["currency"] == "EUR"
    assert found["devices"]["t4"]["peak"]["int8"] == 130e12
    assert found["models"]["late_order"]["training"]["devices"]["t4"]["cost"] > 0


def test_the_command_line_refuses(shop: Shop) -> None:
    assert "student of late_order: not found" in refused(shop, "infra", "plan", code=1)
    assert "'early' is not declared" in refused(shop, "infra", "plan", "early", code=2)
    shop.append("\n[prices]\nhour = { l40 = 1 }\n", "isthmus.toml")
    assert "prices.hour.l40: is not a device" in refused(shop, "infra", "plan", code=2)


@pytest.mark.accept
@pytest.mark.timeout(900)
def test_the_plan_of_a_student_that_was_trained(built: Shop, project: Open) -> None:
    # The gate of `isthmus model export` has tests of its own.
    built.replace('Gate("lift_kept", at_least=0.95)', "")
    built.append("\n[profiles.serving]\nlatency_objective_ms = 1000\n", "isthmus.toml")
    opened = project(built)
    training_set(opened)
    trained = distill(opened)
    exported = export(opened)
    found = plan(opened)["models"]["late_order"]
    assert found["uncounted"] == []
    # The student: its numbers and embeddings, 16 hidden units, one logit.
    flops = found["serving"]["flops"]
    half = json.loads((trained.path / "report.json").read_bytes())["training"]
    # Learning from a row takes three times what answering it does, less what the first layer need not pass on.
    assert 2 * flops < half["flops"] / half["rows"] <= 3 * flops
    assert found["serving"]["check"]["measured_seconds"] * 1e6 == exported.served.p50_us
    assert found["training"]["check"]["ratio"] > 1
    precision: Precision = exported.served.precision  # type: ignore[assignment]
    assert found["serving"]["precision"] == precision
    assert weight_bytes((exported.path / f"model.{precision}.onnx").read_bytes()) < found["serving"]["bytes"]
