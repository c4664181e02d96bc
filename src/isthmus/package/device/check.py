"""Run the ONNX Runtime files of a package on this processor, and print golden cases, latency and memory as JSON.

Needs Python 3.9, NumPy and ONNX Runtime, and no other file. On a device that has a package folder:

    python3 check.py PACKAGE

Prints a JSON object per line: the processor, then each model file. Without a folder, the script reads a ZIP archive of
the package from stdin, so that nothing is written to the device, and also prints all outputs.
"""

import argparse
import base64
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import onnxruntime

TYPES = {"bool": "?", "uint8": "u1", "int32": "<i4", "int64": "<i8", "float": "<f4", "double": "<f8"}
LEAST_CALLS, SECONDS = 20, 10
"""Fewest timed calls of a file; after this time, no more than these."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, help="package folder (default: a ZIP archive on stdin)")
    parser.add_argument("--calls", type=int, default=2000, help="most timed calls of a file; 0 skips the measurement")
    options = parser.parse_args()
    if options.package is not None and not (options.package / "manifest.json").is_file():
        parser.error(f"{options.package} is not a package folder: it has no manifest.json")
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to stdout

    def write(line: Any) -> None:
        print(json.dumps(line), file=lines, flush=True)

    files = {} if options.package is None else {file.name: file for file in options.package.iterdir()}
    archive = ZipFile(BytesIO(sys.stdin.buffer.read())) if options.package is None else None
    read = archive.read if archive else lambda name: files[name].read_bytes()
    names = archive.namelist() if archive else [*files]
    write({"processor": processor()})
    manifest, golden = json.loads(read("manifest.json")), json.loads(read("golden.json"))
    for variant in manifest["variants"]:
        if variant["format"] not in ("onnx", "ort") or variant["file"] not in names:
            continue
        try:
            found = run(read, manifest, variant, golden["cases"], options.calls, keep=archive is not None)
        except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions have no base class of their own
            found = {"error": (str(error) or type(error).__name__)[:300]}
        write({"file": variant["file"], **found})


def processor() -> "dict[str, Any]":
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    part = " ".join(facts[key] for key in ("CPU implementer", "CPU part") if key in facts)
    return {
        "machine": platform.machine(),
        "processor": facts.get("model name") or facts.get("Hardware") or part or platform.processor(),
        "cores": cores,
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnxruntime": onnxruntime.__version__,
    }


def run(
    read: "Callable[[str], bytes]", manifest: Any, variant: Any, cases: Any, calls: int, *, keep: bool
) -> "dict[str, Any]":
    file, names = variant["file"], [output["name"] for output in manifest["outputs"]]
    model = read(file)
    beside = {name: read(name) for name in manifest["files"]} if variant["format"] == "onnx" else {}
    fed = [{name: array(tensor) for name, tensor in case["tensors"].items()} for case in cases]
    one = first_row(manifest, fed[0])
    before = reset_peak()
    began = time.perf_counter()
    session = open_session(model, beside, generates="generation" in manifest)
    session.run(names, one)
    loaded = time.perf_counter() - began
    found: dict[str, Any] = {}
    if calls:
        peak = status("VmHWM")
        memory = None if before is None or peak is None else round((peak - before) / 1024, 2)
        times = timed(lambda: session.run(names, one), calls)
        found = {
            "calls": len(times),
            "load_ms": round(loaded * 1e3, 2),
            "memory_mb": memory,
            "p50_us": round(times[len(times) // 2] * 1e6, 1),
            "p99_us": round(times[len(times) * 99 // 100] * 1e6, 1),
        }
    found["cases"] = []
    for case, feeds in zip(cases, fed):  # noqa: B905 - Python 3.9 has no `strict`
        outputs = dict(zip(names, session.run(names, feeds)))  # noqa: B905
        recorded = case["outputs"].get(file, {})
        compared = compare([(array(tensor), outputs[name]) for name, tensor in recorded.items()])
        kept = {name: plain(value) for name, value in outputs.items()} if keep else {}
        found["cases"].append({**compared, "outputs": kept})
    worst = [case["worst"] for case in found["cases"]]
    found["worst"] = None if None in worst else max(worst)
    found.update({name: sum(case[name] for case in found["cases"]) for name in ("values", "differing")})
    return found


def open_session(model: bytes, beside: "dict[str, bytes]", *, generates: bool) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_mem_pattern = not generates
    options.log_severity_level = 3  # no warnings about the processor
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    # Releases before 1.23 lack it; they open models that keep their weights inside.
    if beside and hasattr(options, "add_external_initializers_from_files_in_memory"):
        sizes = [len(data) for data in beside.values()]
        options.add_external_initializers_from_files_in_memory([*beside], [*beside.values()], sizes)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def first_row(manifest: Any, feeds: "dict[str, Any]") -> "dict[str, Any]":
    """Return the inputs of one prediction: the first row, or everything if a model generates text."""
    rows = manifest["outputs"][0]["shape"][:1]
    if "generation" in manifest or not rows or not isinstance(rows[0], str):
        return feeds
    shapes = {tensor["name"]: tensor["shape"] for tensor in manifest["tensors"]}
    return {
        name: value[tuple(slice(1 if size == rows[0] else None) for size in shapes[name])]
        for name, value in feeds.items()
    }


def timed(call: "Callable[[], Any]", most: int) -> "list[float]":
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < LEAST_CALLS or (len(times) < most and time.perf_counter() < end):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return sorted(times)


def compare(pairs: "list[tuple[Any, Any]]") -> "dict[str, Any]":
    """Count the values that differ in any bit, and find the greatest difference.

    Return `values`, how many there are, `differing`, and `worst`. `worst` is None if it is not a finite number: if
    texts, shapes or types differ, or if two differing values include an infinity or a single NaN. All values of a pair
    with different shapes or types count as differing.
    """
    values, differing, worst = 0, 0, 0.0
    for expected, actual in pairs:
        values += expected.size
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            differing, worst = differing + expected.size, np.inf
            continue
        left, right = expected.reshape(-1), actual.reshape(-1)
        bits = left.dtype if left.dtype == object else f"u{left.itemsize}"
        unlike = left.view(bits) != right.view(bits)
        differing += int(unlike.sum())
        if left.dtype == object:
            worst = np.inf if unlike.any() else worst
            continue
        left, right = (side[unlike].astype(np.float64) for side in (left, right))
        with np.errstate(invalid="ignore"):
            gaps = np.where(np.isnan(left) & np.isnan(right), 0.0, np.abs(left - right))
        worst = max(worst, *np.where(np.isnan(gaps), np.inf, gaps).tolist(), 0.0)
    return {"values": values, "differing": differing, "worst": worst if np.isfinite(worst) else None}


def array(tensor: Any) -> Any:
    if tensor["element"] == "string":
        return np.array(tensor.get("texts", []), object).reshape(tensor["shape"])
    data = base64.b64decode(tensor.get("data", ""))
    return np.frombuffer(data, TYPES[tensor["element"]]).reshape(tensor["shape"])


def plain(value: Any) -> "dict[str, Any]":
    shape = [*value.shape]
    if value.dtype == object:
        return {"element": "string", "shape": shape, "texts": [str(text) for text in value.ravel().tolist()]}
    element = next(name for name, code in TYPES.items() if np.dtype(code) == value.dtype)
    data = np.ascontiguousarray(value, TYPES[element]).tobytes()
    return {"element": element, "shape": shape, "data": base64.b64encode(data).decode()}


def reset_peak() -> Any:
    """Reset the peak of this process's memory, and return its current size in KiB; None without Linux's /proc."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status("VmRSS")


def status(key: str) -> Any:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
    return None


if __name__ == "__main__":
    main()
