"""A server that was told of a key answers with signed packages alone, whatever the deployment says."""

import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from isthmus.features.errors import ConfigurationError, PackageError
from isthmus.features.files import write_atomically
from isthmus.features.profiles import ServingProfile
from isthmus.features.types import Int64
from isthmus.features.values.columns import from_python
from isthmus.package.checksums import verify_checksums
from isthmus.package.manifest import open_package, package_digest, read_package
from isthmus.package.signature import PASSWORD, Signer, key_name, read_public_key, require_signature
from isthmus.serving.deployment.record import Deployment, unverified_deployment
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.rollout.releases import deploy
from tests.serving.support import CONTRACT, NOW, TABLES, make_package, serving, verdict_of, wait
from tests.signing import pair, write_pair

ASKED = {"entities": {"carrier": ["B6"]}, "request": {"distance": [1]}}


def deployed(package: Path, key: str | None = None) -> Deployment:
    file = package.parent / "deployment.json"
    profile = ServingProfile()
    done = deploy(package, verdict_of(package), CONTRACT, profile, file, tables=TABLES, at=NOW, public_key=key)
    return done.deployment


def test_signing_changes_neither_sums_nor_digest(tmp_path: Path) -> None:
    package, (private, public) = make_package(tmp_path / "package"), pair(tmp_path, "mine")
    before, digest = read_package(package), package_digest(package)
    Signer(private).sign(package)
    first = (package / "model.sig").read_bytes()
    Signer(private).sign(package)
    assert (read_package(package), package_digest(package)) == (before, digest)
    assert (package / "model.sig").read_bytes() != first
    require_signature(verify_checksums(package), read_public_key(public))
    moved = package.rename(tmp_path / "under another name")
    require_signature(verify_checksums(moved), read_public_key(public))
    assert [entry.name for entry in tmp_path.glob("*.partial")] == []


def test_each_refusal_of_a_deployment_has_its_sentence(tmp_path: Path) -> None:
    package, (private, public), (_, another) = (
        make_package(tmp_path / "package"),
        pair(tmp_path, "a"),
        pair(tmp_path, "b"),
    )
    key, other = read_public_key(public), read_public_key(another)
    with pytest.raises(PackageError, match="missing: the package is not signed; expected a signature by key"):
        deployed(package, key)
    Signer(private).sign(package)
    with pytest.raises(
        PackageError, match=f"signed by key {key_name(key)}; expected a signature by key {key_name(other)}"
    ):
        deployed(package, other)
    deployment = deployed(package, key)
    file = tmp_path / "deployment.json"
    assert Deployment.loads(deployment.dumps(file), str(file)) == deployment
    assert deployment.public_key == key
    DeployedModel(deployment)
    DeployedModel(deployment, key)
    with pytest.raises(PackageError, match="expected a signature by key"):
        DeployedModel(deployment, other)
    (Path(deployment.package) / "model.sig").unlink()
    for told in (deployment, msgspec.structs.replace(deployment, public_key=None)):
        with pytest.raises(PackageError, match="is not signed"):
            DeployedModel(told, key)
    DeployedModel(msgspec.structs.replace(deployment, public_key=None))
    with pytest.raises(PackageError, match="is not signed"):
        DeployedModel(deployment)


def test_an_altered_package_is_not_served(tmp_path: Path) -> None:
    package, (private, public) = make_package(tmp_path / "package"), pair(tmp_path, "mine")
    Signer(private).sign(package)
    other = make_package(tmp_path / "other", weight=-1.0)
    (other / "model.sig").write_bytes((package / "model.sig").read_bytes())
    with pytest.raises(PackageError, match="was changed after it was signed"):
        deployed(other, read_public_key(public))


class Opening:
    """Does something when a file of a folder is about to be opened for a certain time."""

    def __init__(self) -> None:
        self.left = 0
        self._folder: Path | None = None
        self._do: Callable[[], object] = int
        sys.addaudithook(self._audit)

    @contextmanager
    def doing(self, do: Callable[[], object], folder: Path, number: int) -> Iterator[None]:
        self.left, self._folder, self._do = number, folder, do
        try:
            yield
        finally:
            self._folder = None

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or self._folder is None or isinstance(arguments[0], int):
            return
        if Path(os.fsdecode(arguments[0])).parent == self._folder:
            self.left -= 1
            if not self.left:
                self._do()


OPENING = Opening()


def test_what_was_verified_is_what_is_served(tmp_path: Path) -> None:
    """Whenever somebody swaps the files, what answers is the signed model, or none."""
    inputs = [("punctuality__flights", Int64)]
    (private, public), folder = pair(tmp_path, "mine"), tmp_path / "package"
    signed = make_package(tmp_path / "signed", inputs=inputs)
    forged = make_package(tmp_path / "forged", inputs=inputs, weight=-1.0)
    Signer(private).sign(signed)
    shutil.copytree(signed, folder)
    key, row = read_public_key(public), {"punctuality__flights": from_python([1], Int64)}
    profile = ServingProfile()
    deployment = unverified_deployment(open_package(folder), profile, NOW, key)

    def swap(package: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(package, folder)

    refused = 0
    for number in count(1):
        swap(signed)
        with OPENING.doing(lambda: swap(forged), folder, number):
            try:
                model = DeployedModel(deployment, key)
            except PackageError:
                refused += 1
                continue
            assert np.all(model.predict(row) > 0.5), f"swapped at opening {number}, the forged model answers"
            if OPENING.left > 0:
                break
    assert refused > 3


def test_a_model_does_not_hold_the_bytes_of_its_file(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package", ballast=2)
    deployment = unverified_deployment(open_package(package), ServingProfile(), NOW, None)
    tracemalloc.start()
    try:
        model = DeployedModel(deployment)
        assert tracemalloc.get_traced_memory()[0] < (package / "model.int8.ort").stat().st_size / 2
    finally:
        tracemalloc.stop()
    assert model.seconds > 0


def test_a_server_takes_up_signed_packages_alone(tmp_path: Path, redis_url: str) -> None:
    private, public = pair(tmp_path, "mine")
    signed, unsigned = make_package(tmp_path / "signed"), make_package(tmp_path / "unsigned", weight=-1.0)
    Signer(private).sign(signed)
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, redis_url, public_key=read_public_key(public)) as server:
        server.deploy(unsigned)
        wait(lambda: "is not signed" in str(server.lines()), "the refusal")
        assert server.predict(**ASKED).status_code == 503
        server.deploy(signed)
        wait(lambda: server.http.get("/models").json()["models"], "the signed one")
        server.deploy(unsigned)
        wait(lambda: "is not signed" in str(server.http.get("/models").json()["refused"]), "the second refusal")
        assert server.predict(**ASKED).json()["predictions"][0] > 0.5
        write_atomically(signed / "model.sig", b"{}")
        server.deploy(signed)
        wait(lambda: "is not a signature" in str(server.http.get("/models").json()["refused"]), "the third refusal")


def test_no_message_shows_the_password(tmp_path: Path) -> None:
    private, public = pair(tmp_path, "locked", "open sesame")
    bare, _ = pair(tmp_path, "bare")
    package = make_package(tmp_path / "package")
    Signer(private, "open sesame").sign(package)
    require_signature(verify_checksums(package), read_public_key(public))
    for key, password, words in (
        (private, None, f"has a password; expected it in {PASSWORD}"),
        (private, "open barley", f"is not a private key that {PASSWORD} opens"),
        (bare, "open sesame", f"has no password; expected no {PASSWORD}"),
        (public, None, "is not a private key; expected an elliptic key"),
        (tmp_path / "none", None, "cannot be read"),
    ):
        with pytest.raises(ConfigurationError, match=words) as caught:
            Signer(key, password)
        assert not any(word in str(caught.value) for word in ("sesame", "barley"))


def test_a_server_is_not_told_the_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "open sesame")
    with serving(tmp_path, "redis://127.0.0.1:1") as server:
        assert "open sesame" not in str(psutil.Process(server.process.pid).environ())
    assert os.environ[PASSWORD] == "open sesame"


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    private, public = write_pair(tmp_path, "rsa", rsa.generate_private_key(65537, 2048))
    with pytest.raises(ConfigurationError, match="is a key of another kind"):
        Signer(private)
    for file in (public, private):
        with pytest.raises(ConfigurationError, match=r"is not a public elliptic key; expected `openssl pkey"):
            read_public_key(file)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="is not a public elliptic key"):
        read_public_key(binary)


def test_without_the_extra_it_is_named(tmp_path: Path) -> None:
    private, public = pair(tmp_path, "mine")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "sys.modules['cryptography'] = None\n"
        "from isthmus.features.errors import DependencyError\n"
        "from isthmus.package.signature import Signer, read_public_key\n"
        "for ask, file in ((Signer, sys.argv[1]), (read_public_key, sys.argv[2])):\n"
        "    try:\n"
        "        ask(Path(file))\n"
        "    except DependencyError as error:\n"
        "        print(error)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code, private, public], check=True, capture_output=True, text=True)
    assert shown.stdout.count("signing: cannot be imported") == 2
    assert shown.stdout.count("Install it: pip install 'isthmus[signing]'") == 2


@pytest.mark.accept
def test_openssl_alone_can_verify_as_documented(tmp_path: Path) -> None:
    document = (Path(__file__).parents[3] / "docs" / "packages.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```bash\n(.*?)```", document, re.DOTALL)
    package, (private, public), (_, other) = (
        make_package(tmp_path / "package"),
        pair(tmp_path, "a"),
        pair(tmp_path, "b"),
    )
    Signer(private).sign(package)

    def code(key: Path) -> int:
        arguments = ["bash", "-c", script, "verify.sh", str(package), str(key)]
        return subprocess.run(arguments, check=False, capture_output=True).returncode

    assert (code(public), code(other)) == (0, 1)
    (package / "more").touch()
    assert code(public) == 1
    (package / "more").unlink()
    sums = package / "SHA256SUMS"
    whole = sums.read_text()
    (package / "golden.json").write_bytes(b"{}")
    assert code(public) == 1
    subprocess.run("sha256sum *.json *.ort > SHA256SUMS", shell=True, check=True, cwd=package)  # noqa: S602 - as a forger
    assert (sums.read_text() != whole, code(public)) == (True, 1)
