"""Measure the time from `deploy` to the first prediction, and requests under load while packages are swapped.

One server over one Redis alternates between two packages of the same service. First, each swap is timed from the call
of `deploy` (checks, cache, loading, warm-up, the write) to the first answer from the new package. Then wrk sends
predictions while `deploy` swaps packages; an answer other than 200 or a broken connection is a failed request.

Needs `redis-server` and `wrk`. Run it on an idle machine.
"""

import math
import shutil
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from processes import last_json
from result import Comparison, at_most, options_parser, plain_figure, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.serving.support import CONTRACT, Server, fill, make_package, serving, wait

from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.package.manifest import package_digest

SCRIPT = Path(__file__).with_name("lookup.lua")
BODY = '{"entities":{"carrier":["UA"]},"request":{"distance":[$KEYS]}}'
REQUEST: dict[str, Any] = {"entities": {"carrier": ["UA"]}, "request": {"distance": [1]}}
BAR_SECONDS = 2.0
CONNECTIONS = 32


def load(server: Server, seconds: int) -> dict[str, Any]:
    url = str(server.http.base_url)
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency", "-s", str(SCRIPT), url]
    return last_json(command, {"LOOKUP_PATH": "/predict", "LOOKUP_BODY": BODY})


def first_prediction(server: Server, package: Path) -> float:
    """Return the seconds from `deploy` to the first answer from the package."""
    began = time.perf_counter()
    server.deploy(package)
    digest = package_digest(package)
    while server.predict(**REQUEST).json()["package"] != digest:
        pass
    return time.perf_counter() - began


def swap(server: Server, package: Path) -> None:
    server.deploy(package)
    digest = package_digest(package)
    wait(lambda: server.http.get("/models").json()["models"][0]["package"] == digest, "the swap", 60)


def measured(server: Server, packages: list[Path], requests: int, swaps: int, turns: int) -> list[Comparison]:
    server.deploy(packages[0])
    wait(lambda: server.predict(**REQUEST).status_code == 200, "the first package", 60)
    taken = [first_prediction(server, packages[turn % 2]) for turn in range(1, turns + 1)]
    rate = load(server, 2)["requests_per_s"]
    # Factor 1.5: the server is slower while it loads packages.
    seconds = math.ceil(max(1.5 * requests / rate, 1.5 * swaps * statistics.fmean(taken)))
    with ThreadPoolExecutor(1) as executor:
        result = executor.submit(load, server, seconds)
        for turn in range(swaps):
            swap(server, packages[turn % 2])
            if result.done():
                raise RuntimeError(f"the load ended after {turn + 1} of {swaps} swaps: use an idle machine")
        figures = result.result()
    if figures["requests"] < requests:
        raise RuntimeError(f"{figures['requests']:,} requests of {requests:,}: use an idle machine")
    failed = figures["non2xx"] + figures["socket_errors"]
    case = f"{figures['requests']:,} requests during {swaps} swaps"
    return [
        at_most("from deploy to the first prediction, median", "s", statistics.median(taken), BAR_SECONDS),
        at_most("from deploy to the first prediction, worst", "s", max(taken), BAR_SECONDS),
        at_most(f"{case}: failed", "requests", failed, 0),
        plain_figure(f"{case}: p99", "ms", figures["p99_ms"]),
    ]


def main() -> int:
    options = options_parser(__doc__, "few requests and swaps").parse_args()
    if missing := [name for name in ("redis-server", "wrk") if shutil.which(name) is None]:
        sys.exit(f"benchmarks/deploy.py needs {' and '.join(missing)} on PATH")
    requests, swaps, turns = (2_000, 4, 3) if options.quick else (100_000, 20, 11)
    with TemporaryDirectory(prefix="isthmus-deploy-") as folder, EmbeddedRedis(Path(folder) / "redis") as redis:
        fill(redis.url)
        root = Path(folder) / "server"
        root.mkdir()
        (root / "contract.json").write_bytes(CONTRACT.dumps())
        packages = [make_package(root / f"package {weight}", weight=weight) for weight in (1.0, -1.0)]
        with serving(root, redis.url) as server:
            comparisons = measured(server, packages, requests, swaps, turns)
    return report("deploy", comparisons, as_json=options.json, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
