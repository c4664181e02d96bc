"""The module paths of version 0.1 that users may have written."""

import sys
from importlib import import_module

import pytest

from isthmus._moved import MOVED


@pytest.mark.parametrize("path", MOVED)
def test_an_old_path_leads_to_its_module_and_warns(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, path, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{path} has moved: use {MOVED[path]}"):
        old = vars(import_module(path))
    public = {name: value for name, value in vars(import_module(MOVED[path])).items() if name[:2] != "__"}
    assert public
    assert public.items() <= old.items()
