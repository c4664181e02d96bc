"""Sign snapshots (`SnapshotSigner`) with ECDSA and P-256, which browsers, Android and iOS verify without a library."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.features.errors import ConfigurationError, DataError, Problem, extra
from isthmus.features.files import scratch_folder, write_atomically
from isthmus.package.signature import public_pem, read_private_key
from isthmus.package.snapshot.file import SIGNATURE_SIZE, SnapshotFile

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_CURVE = "secp256r1"
_HALF = SIGNATURE_SIZE // 2


@dataclass(frozen=True)
class SnapshotSigner:
    key: "EllipticCurvePrivateKey"

    @classmethod
    def of(cls, file: Path, password: str | None = None) -> "SnapshotSigner":
        with extra("devices"):
            import cryptography  # noqa: F401 - so that a missing `cryptography` names this extra, not `signing`
        key = read_private_key(file, password)
        if key.curve.name != _CURVE:
            problem = Problem("key", f"has curve {key.curve.name}", f"{_CURVE}, which every device can verify")
            raise ConfigurationError(str(file), [problem])
        return cls(key)

    def seal(self, snapshot: SnapshotFile) -> SnapshotFile:
        return snapshot.signed(self.sign(snapshot.body))

    def sign(self, body: bytes) -> bytes:
        """Return the ECDSA signature (64 bytes, r and s) of `body`, the bytes of a snapshot without its signature."""
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
        from cryptography.hazmat.primitives.hashes import SHA256

        halves = decode_dss_signature(self.key.sign(body, ECDSA(SHA256())))
        return b"".join(half.to_bytes(_HALF) for half in halves)

    @property
    def public_key(self) -> str:
        return public_pem(self.key.public_key()).decode()


def create_key(file: Path) -> None:
    """Create the private key (P-256, PEM) that signs a project's snapshots, unless `file` exists.

    The key has no password, and only the current user can read it. Creates a missing parent folder. Raises
    DependencyError if the extra `devices` is not installed.
    """
    with extra("devices"):
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    file.parent.mkdir(parents=True, exist_ok=True)
    pem = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with scratch_folder(file.parent, f".{file.name}") as scratch:
        write_atomically(scratch / file.name, pem, mode=0o600)
        # If another process was faster, keep its key.
        with suppress(FileExistsError):
            file.hardlink_to(scratch / file.name)


def require_sealed(snapshot: SnapshotFile, public_key: str, where: str = "snapshot") -> None:
    if not signature_checker(public_key, where)(snapshot.data):
        raise DataError(where, "is not signed by the key of the project, or was changed after it was signed")


def signature_checker(public_key: str, where: str = "snapshot") -> Callable[[bytes], bool]:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = load_pem_public_key(public_key.encode())
    if not isinstance(key, EllipticCurvePublicKey):
        raise DataError(where, "cannot be verified: the key is not elliptic", expected="the public key of the project")

    def signed(data: bytes) -> bool:
        body, signature = data[:-SIGNATURE_SIZE], data[-SIGNATURE_SIZE:]
        halves = (int.from_bytes(part) for part in (signature[:_HALF], signature[_HALF:]))
        try:
            key.verify(encode_dss_signature(*halves), body, ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True

    return signed
