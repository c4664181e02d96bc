"""Reports of runs, as plain data."""

import math
from typing import Any

HOSTILE = "<script>document.title='taken'</script>&\"'|`*_[x](y)"


def report() -> dict[str, Any]:
    """Of a run that went well, and has been exported."""
    students = {"student": (0.7471, 0.6120), "control": (0.7386, 0.6168)}
    runs = []
    for taught, (auc, loss) in students.items():
        for seed, off in enumerate((-0.0004, 0.0001, 0.0003)):
            history = [
                {"step": 224 * n, "loss": loss + 0.09 * math.exp(-n) + off, "validation_auc": auc - 0.05 / n + off}
                for n in range(1, 9)
            ]
            quality = {"auc": auc + off, "log_loss": loss - off, "brier": 0.21 - off, "ece": 0.0151 + off}
            runs.append({"model": taught, "seed": seed, "steps": 1792, "seconds": 4.4, "quality": quality,
                         "history": history, "planned": 2240 if seed == 2 else 1792})  # fmt: skip

    def model(about: str, auc: float, **more: Any) -> dict[str, Any]:
        quality = {"auc": auc, "log_loss": 1.0 - auc / 2, "brier": 0.21, "ece": 0.0151}
        return {"about": about, "quality": quality, "intervals": {}, **more}

    onnx, sklearn = "onnxruntime 1.31, 1 thread", "scikit-learn 1.9, 1 thread"
    bounds = {"auc": [0.7460, 0.7482], "log_loss": [0.6249, 0.6280]}
    return {
        "format": 1,
        "id": "5f0c2a9be1d4",
        "name": "late_arrival",
        "task": "tabular",
        "pipeline": "tabular-classification",
        "metric": "auc",
        "seeds": [0, 1, 2],
        "shipped": 1,
        "models": {
            "teacher": model("gradient boosting, all server-side features", 0.7512, parameters=5460, bytes=225376,
                             p50_us=2538.7, p99_us=3661.6, runtime=sklearn),
            "reference": model("gradient boosting, the student's features", 0.7447, parameters=4200, bytes=180000,
                               p50_us=2400.0, p99_us=3500.0, runtime=sklearn),
            "student": {**model("two hidden layers, taught", 0.7471, parameters=2881, bytes=15210, p50_us=41.0,
                                p99_us=83.0, runtime=onnx), "intervals": bounds},
            "control": {**model("the same, without the teacher", 0.7386, parameters=2881, bytes=15210, p50_us=41.4,
                                p99_us=84.0, runtime=onnx), "intervals": {"auc": [0.7370, 0.7402]}},
        },
        "runs": runs,
        "gap_closed": {"value": 0.69, "low": 0.61, "high": 0.77},
        "taught": {"value": 0.0085, "low": 0.0081, "high": 0.0089},
        "agreement": {"student": {"agreement": 0.93, "kl": 0.011}, "control": {"agreement": 0.88, "kl": 0.031}},
        "slices": [
            {"column": "carrier", "value": "AA", "rows": 5000, "teacher": 0.74, "student": 0.70, "control": 0.69},
            {"column": "distance", "value": "over 872 to 1389", "rows": 9120, "teacher": 0.76, "student": 0.745,
             "control": 0.741},
            {"column": "wind_speed", "value": None, "rows": 712, "teacher": 0.71, "student": 0.70, "control": None},
        ],
        "rows": {"train": 228907, "validation": 48000, "test": 49500},
        "boundaries": ["2013-08-27T10:00:00+00:00", "2013-10-31T12:00:00+00:00"],
        "seconds": {"teacher": 12.4, "student": 13.1, "control": 12.9},
        "gates": [{"metric": "lift_kept", "at_least": 0.95, "at_most": None, "found": 1.0, "holds": True}],
        "training": {"device": "cpu", "precision": "fp32", "threads": 2, "rows": 228907, "steps": 1790,
                     "seconds": 26.1, "device_hours": 0.0073, "flops": 1.2e11, "peak_mb": 812,
                     "rows_per_second": 52000},
        "serving": {"runtime": "onnxruntime 1.31", "precision": "int8", "threads": 1, "p50_us": 42, "p99_us": 83,
                    "requests_per_second": 22000, "memory_mb": 12.5, "load_ms": 8.5, "host": "x86_64, 2 cores"},
    }  # fmt: skip


def sparse() -> dict[str, Any]:
    """Of one seed, with nothing that may be left out."""
    names = ("format", "id", "name", "task", "metric")
    return {name: report()[name] for name in names} | {"models": {}}


def empty() -> dict[str, Any]:
    """With every part, and every number null."""
    return dict(_nulled(report()))


def _nulled(part: Any) -> Any:
    kept = ("format", "seed", "rows", "shipped", "seeds")
    if isinstance(part, dict):
        return {
            name: _nulled(value) if isinstance(value, dict | list) or name not in kept else value
            for name, value in part.items()
            if name != "rows" or not isinstance(value, dict)
        }
    if isinstance(part, list):
        return [_nulled(one) if isinstance(one, dict) else one for one in part]
    return None if isinstance(part, int | float) and not isinstance(part, bool) else part


def hostile() -> dict[str, Any]:
    """Every text is markup, and numbers are extreme."""
    found: dict[str, Any] = _marked(report())
    found["format"] = 1
    for n, name in enumerate(("teacher", "student")):
        found["models"][name] = {**report()["models"][name], "about": HOSTILE, "runtime": HOSTILE}
        found["models"][name]["quality"] = {"auc": (-1) ** n * 1.7e308, HOSTILE: 5e-324 * n}
        found["models"][name]["intervals"] = {"auc": [-1.7e308, 1.7e308], HOSTILE: [-5e-324, 5e-324]}
        found["models"][name]["p50_us"] = 1e-9 if n else 1e12
    found["runs"][0]["history"] = [{"step": n, "loss": (-1) ** n * 1e299, HOSTILE: 7.0} for n in range(1000)]
    return found


def _marked(part: Any) -> Any:
    if isinstance(part, dict):
        free = {"models", "agreement", "quality", "intervals"}
        return {
            (HOSTILE if name in ("control", "loss", "log_loss") else name): _marked(value)
            if name not in free or isinstance(value, dict)
            else value
            for name, value in part.items()
        }
    if isinstance(part, list):
        return [_marked(one) for one in part]
    return HOSTILE if isinstance(part, str) else part
