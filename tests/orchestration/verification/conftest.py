from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Verdicts are the same on machines that have onnxruntime-web and on those that do not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))


@pytest.fixture
def web(cache: Path, monkeypatch: pytest.MonkeyPatch, _nothing_installed: None) -> None:
    """onnxruntime-web is installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
