"""`isthmus keys`, and a server of the project that asks for them."""

import json
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.features.errors import ConfigurationError, DataError, RequestError
from isthmus.features.files import write_atomically
from isthmus.orchestration.project import Project
from isthmus.orchestration.server import keys
from isthmus.orchestration.server.serve import settings
from isthmus.serving.keys import PATTERN, Keyring, required_marker
from tests.commandline import run
from tests.orchestration.shop import Shop


def test_a_key_from_its_making_to_its_end(shop: Shop) -> None:
    made = json.loads(
        run("keys", "create", "backend", "--scope", "read:*", "--scope", "push:a", "--json", cwd=shop.root).stdout
    )
    assert (made["name"], made["scopes"]) == ("backend", ["read:*", "push:a"])
    assert PATTERN.fullmatch(made["key"].encode())
    shown = run("keys", "create", "phone", "--scope", "predict:late", cwd=shop.root).stdout
    assert PATTERN.search(shown.encode())
    file = shop.state / "keys.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = Keyring.read(file).find(made["key"].encode())
    assert found is not None
    assert found.name == "backend"

    listed = run("keys", "list", "--json", cwd=shop.root).stdout
    assert {name: row["scopes"] for name, row in json.loads(listed).items()} == {
        "backend": ["read:*", "push:a"], "phone": ["predict:late"],
    }  # fmt: skip
    table = run("keys", "list", cwd=shop.root).stdout
    assert "backend" in table
    assert "read:*, push:a" in table
    for text in (listed, table, file.read_text()):
        assert not PATTERN.search(text.encode())

    assert json.loads(run("keys", "revoke", "backend", "--json", cwd=shop.root).stdout) == {
        "revoked": "backend",
        "left": 1,
    }
    assert Keyring.read(file).find(made["key"].encode()) is None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    left = run("keys", "open", cwd=shop.root)
    assert (left.returncode, "API keys: still valid: phone. Revoke them first" in left.stderr) == (2, True)
    assert "isthmus keys open" in json.loads(run("keys", "revoke", "phone", "--json", cwd=shop.root).stdout)["note"]
    assert run("keys", "list", "--json", cwd=shop.root).stdout.strip() == "{}"
    assert required_marker(file).exists()
    assert "loopback" in json.loads(run("keys", "open", "--json", cwd=shop.root).stdout)["open"]
    assert Keyring.read(file) == Keyring(open=True)
    run("keys", "create", "again", "--scope", "read:*", cwd=shop.root)
    assert Keyring.read(file).open is not True


def test_wrong_usage_is_one_sentence(shop: Shop) -> None:
    project = Project(shop.root)
    keys.create(project, "owner", ["read:*"])
    for arguments, found in (
        (["create", "owner", "--scope", "read:*"], "API key owner: already exists. Revoke it first"),
        (["revoke", "nobody"], "API key nobody: does not exist; expected owner"),
        (["create", "x"], "Missing option '--scope'"),
        (["create", "x y", "--scope", "write:*"], "API key: 2 problems\n  - name: 'x y'"),
    ):
        done = run("keys", *arguments, cwd=shop.root)
        assert (done.returncode, done.stdout) == (2, "")
        assert found in done.stderr
    assert [key.name for key in Keyring.read(project.keys_file).keys] == ["owner"]


def test_a_broken_key_file_is_not_written_over(shop: Shop) -> None:
    project = Project(shop.root)
    write_atomically(project.keys_file, b"{")
    with pytest.raises(DataError, match="is not a file of API keys"):
        keys.create(project, "x", ["read:*"])
    with pytest.raises(DataError, match="is not a file of API keys"):
        keys.revoke(project, "x")
    assert project.keys_file.read_bytes() == b"{"


def test_changes_at_the_same_time_are_all_kept(shop: Shop) -> None:
    project = Project(shop.root)
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda n: keys.create(project, f"key{n}", ["read:*"]), range(24)))
        ring = Keyring.read(project.keys_file)
        assert {key.name for key in ring.keys} == {f"key{n}" for n in range(24)}
        assert all(ring.find(one["key"].encode()) for one in made)
        list(threads.map(lambda n: keys.revoke(project, f"key{n}"), range(23)))
    assert [key.name for key in Keyring.read(project.keys_file).keys] == ["key23"]


def test_no_name_is_given_twice_at_the_same_time(shop: Shop) -> None:
    project = Project(shop.root)

    def create(_: int) -> bool:
        try:
            keys.create(project, "owner", ["read:*"])
        except RequestError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(create, range(16))) == 1


def test_a_server_of_the_project_listens_beyond_loopback_with_a_key_only(shop: Shop) -> None:
    shop.append('[server]\nhost = "0.0.0.0"\n[server.limits]\nrows = 7\n', "isthmus.toml")
    refused = run("serve", cwd=shop.root)
    assert refused.returncode == 2
    assert "there are no API keys" in refused.stderr
    project = Project(shop.root)
    with pytest.raises(ConfigurationError, match="there are no API keys"):
        settings(project, "redis://127.0.0.1:1")
    keys.create(project, "owner", ["read:*"])
    assert settings(project, "redis://127.0.0.1:1").limits.rows == 7
    # That of `isthmus demo` has no key to ask with, and is nobody else's.
    private = settings(project, "redis://127.0.0.1:1", private=True)
    assert (private.keys, private.host) == (None, "127.0.0.1")
