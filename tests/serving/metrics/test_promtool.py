"""The alert rules in Prometheus itself: promtool, of Debian's package `prometheus`, loads and tries them."""

import os
import shutil
import subprocess
from importlib.resources import as_file, files
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.accept

QUALITY = 'isthmus_production_bound_broken{job="shop", instance="a", model="late", metric="auc"}'
DRIFTED = 'isthmus_production_drifted{job="shop", instance="a", model="late", input="score"}'
WAITS = 'isthmus_view_waiting_seconds{job="shop", instance="a", view="habits"}'
WITHIN = 'isthmus_history_objective_seconds{job="shop", instance="a"}'
DROPPED = 'isthmus_dropped_answers_total{job="shop", instance="a", where="disk"}'
SPOOL, LIMIT = (f'isthmus_spool_{name}{{job="shop", instance="a"}}' for name in ("bytes", "limit_bytes"))
UNCOLLECTED = 'isthmus_spool_waiting_seconds{job="shop", instance="a"}'
AGE = 'isthmus_production_age_seconds{job="shop", instance="a", model="late"}'


def promtool(*arguments: str) -> str:
    program = shutil.which("promtool")
    if program is None:
        assert not os.environ.get("CI"), "promtool is missing: install the package prometheus"
        pytest.skip("promtool is missing: install the package prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_accepts_the_rules_and_they_fire_when_they_should(tmp_path: Path) -> None:
    with as_file(files("isthmus.serving") / "prometheus" / "alerts.yaml") as rules:
        count = sum(len(group["rules"]) for group in yaml.safe_load(rules.read_text())["groups"])
        assert f"{count} rules found" in promtool("check", "rules", str(rules))
        labels = {
            "IsthmusQualityBroken": {"severity": "critical", "job": "shop", "model": "late", "metric": "auc"},
            "IsthmusDrift": {"severity": "warning", "job": "shop", "model": "late", "input": "score"},
            "IsthmusQualityUnknown": {"severity": "warning", "job": "shop", "model": "late"},
            "IsthmusHistoryBehind": {"severity": "warning", "job": "shop", "view": "habits"},
            "IsthmusAnswersDropped": {"severity": "warning", "job": "shop", "where": "disk"},
            "IsthmusAnswersNotCollected": {"severity": "warning", "job": "shop"},
        }
        # Of the first five minutes all is well; then nobody measures any more, for two days and more.
        series = {
            QUALITY: "0x4 1x5000", DRIFTED: "0x4 1x5000", AGE: "0+60x5000",
            # Collected every minute for half an hour, and no more; an answer that is dropped once.
            WAITS: "60x29 60+60x5000", WITHIN: "60x5000", DROPPED: "0x59 7x5000", UNCOLLECTED: "0+60x5000",
            # Full to the half within an hour; then emptied.
            SPOOL: "0x29 600x30 10x5000", LIMIT: "1000x5000",
        }  # fmt: skip

        def fires(alert: str, at: str, firing: bool) -> dict[str, object]:
            expected = [{"exp_labels": labels[alert]}] if firing else []
            return {"eval_time": at, "alertname": alert, "exp_alerts": expected}

        # promtool compares annotations, too, unless they are left out of the rules: their words are for people.
        plain = yaml.safe_load(rules.read_text())
        for group in plain["groups"]:
            for rule in group["rules"]:
                del rule["annotations"]
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(plain))
        tests = {
            "rule_files": ["rules.yaml"],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "alert_rule_test": [
                        fires("IsthmusQualityBroken", "4m", False), fires("IsthmusQualityBroken", "10m", True),
                        fires("IsthmusDrift", "4m", False), fires("IsthmusDrift", "10m", True),
                        fires("IsthmusQualityUnknown", "2d", False), fires("IsthmusQualityUnknown", "2d1h", True),
                        fires("IsthmusHistoryBehind", "29m", False), fires("IsthmusHistoryBehind", "45m", True),
                        fires("IsthmusAnswersDropped", "59m", False), fires("IsthmusAnswersDropped", "62m", True),
                        fires("IsthmusAnswersDropped", "80m", False),
                        fires("IsthmusAnswersNotCollected", "35m", False),
                        fires("IsthmusAnswersNotCollected", "45m", True),
                        fires("IsthmusAnswersNotCollected", "2h", False),
                        fires("IsthmusAnswersNotCollected", "25h", True),
                    ],
                }
            ],
        }  # fmt: skip
        (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
        promtool("test", "rules", str(tmp_path / "tests.yaml"))
