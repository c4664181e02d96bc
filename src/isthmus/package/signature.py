"""Sign packages with an elliptic key: `model.sig` is a Sigstore bundle (OpenSSF Model Signing) over all other files."""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.features.errors import ConfigurationError, DependencyError, PackageError, Problem
from isthmus.features.files import scratch_folder, write_atomically
from isthmus.package.checksums import SIGNATURE, SUMS, PackageFiles, read_file, require_unique_keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from model_signing.hashing import Config as Hashing

PASSWORD = "ISTHMUS_SIGNING_PASSWORD"  # noqa: S105 - the name of the variable that holds it
"""Environment variable with the password of a private key."""

_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_PAIR = "an elliptic key in PEM, for example by `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256`"


class _KeyHint(msgspec.Struct):
    hint: str


class _Material(msgspec.Struct, rename="camel"):
    public_key: _KeyHint


class _Envelope(msgspec.Struct):
    payload: bytes


class _Bundle(msgspec.Struct, rename="camel"):
    verification_material: _Material
    dsse_envelope: _Envelope


class _Resource(msgspec.Struct):
    name: str
    digest: str


class _Resources(msgspec.Struct):
    resources: tuple[_Resource, ...]


class _Statement(msgspec.Struct):
    predicate: _Resources


class Signer:
    """A signer of packages with the elliptic private key in a PEM file. Messages never show the password.

    Raises ConfigurationError if the key or its password is unusable, and DependencyError without the extra `signing`.
    """

    def __init__(self, key: Path, password: str | None = None) -> None:
        try:
            from model_signing.signing import Config
        except ImportError as error:
            raise _missing(error) from error
        read_private_key(key, password)
        secret: Any = password.encode() if password else None
        # Annotated as str, but passed to a function that takes bytes.
        self._config = Config().use_elliptic_key_signer(private_key=key, password=secret)

    def sign(self, package: Path) -> None:
        """Sign the files in a package folder, so that servers with the public key accept it: write `model.sig` there.

        Replaces an earlier signature. The digest of the package stays the same.
        """
        # Write it outside the package first: a server must not read a partial signature.
        with scratch_folder(package.parent, f".{package.name}-signature") as scratch:
            file = scratch / SIGNATURE
            self._config.set_hashing_config(_hashing()).sign(package, file)
            write_atomically(file, file.read_bytes())
            file.replace(package / SIGNATURE)


def read_private_key(file: Path, password: str | None = None) -> "EllipticCurvePrivateKey":
    try:
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise _missing(error) from error
    secret = password.encode() if password else None
    try:
        loaded = load_pem_private_key(file.read_bytes(), secret)
    except OSError as error:
        raise _unusable(file, f"cannot be read ({error.strerror})", "the file of a private key") from error
    except TypeError as error:  # an unneeded or a missing password
        if secret:
            raise _unusable(file, "has no password", f"no {PASSWORD}") from error
        raise _unusable(file, "has a password", f"it in {PASSWORD}") from error
    except Exception as error:  # OpenSSL raises many kinds of errors
        reason = f"is not a private key that {PASSWORD} opens" if secret else "is not a private key"
        raise _unusable(file, reason, _PAIR) from error
    if not isinstance(loaded, EllipticCurvePrivateKey) or loaded.curve.name not in _CURVES:
        raise _unusable(file, "is a key of another kind", _PAIR)
    return loaded


def read_public_key(file: Path) -> str:
    try:
        text = file.read_text(encoding="ascii")
        _public_key(text)
    except OSError as error:
        raise _unusable(file, f"cannot be read ({error.strerror})", "the file of a public key") from error
    except ValueError as error:
        raise _unusable(file, "is not a public elliptic key", "`openssl pkey -in PRIVATE_KEY -pubout`") from error
    return text


def key_name(key: str) -> str:
    return _name(_hint(_public_key(key)))


def require_signature(files: PackageFiles, key: str) -> None:
    """Raise PackageError unless the private key that belongs to `key` signed exactly these files of a package.

    Call it before the package is used. `key` is a public key (PEM). Reads the files again, since they may have been
    replaced after their checksums were computed.
    """
    try:
        public = _public_key(key)
    except ValueError as error:
        remedy = "run `isthmus deploy` with the right packages.public_key"
        raise PackageError(f"package {files.folder}", "must be signed, but the key to check it with is invalid",
                           expected="a key in PEM", remedy=remedy) from error  # fmt: skip
    hint = _hint(public)

    def refusal(reason: str) -> PackageError:
        remedy = "copy the package from where it was signed, or sign it: export it with packages.signing_key"
        expected = f"a signature by key {_name(hint)}"
        return PackageError(str(files.folder / SIGNATURE), reason, expected=expected, remedy=remedy)

    if SIGNATURE not in files.sizes:
        raise refusal("missing: the package is not signed")
    data = read_file(files.folder / SIGNATURE)
    try:
        bundle = msgspec.json.decode(data, type=_Bundle)
        require_unique_keys(files.folder / SIGNATURE, data)
        statement = msgspec.json.decode(bundle.dsse_envelope.payload, type=_Statement)
    except (ValueError, RecursionError) as error:  # ValueError includes msgspec's errors
        raise refusal(f"is not a signature ({error})") from error
    if (signer := bundle.verification_material.public_key.hint) != hint:
        raise refusal(f"the package is signed by key {_name(signer)}")
    _verify(files.folder, data, public, refusal)
    # Files may have been replaced since their checksums were computed; `files.digest` covers the files we use.
    signed = {resource.name: resource.digest for resource in statement.predicate.resources}
    if signed != {SUMS: files.digest, **files.sums}:
        raise refusal("the package was changed after it was signed")


def _verify(package: Path, data: bytes, key: "EllipticCurvePublicKey", refusal: Callable[[str], PackageError]) -> None:
    from cryptography.exceptions import InvalidSignature
    from model_signing.verifying import Config

    with tempfile.TemporaryDirectory() as folder:
        pem, signature = Path(folder) / "key.pem", Path(folder) / SIGNATURE
        pem.write_bytes(public_pem(key))
        # Use the bytes read before: the package's own file may have been replaced.
        signature.write_bytes(data)
        config = Config().use_elliptic_key_verifier(public_key=pem).set_hashing_config(_hashing())
        try:
            config.verify(package, signature)
        except InvalidSignature as error:
            raise refusal(f"is not a signature of key {_name(_hint(key))}, although it names that key") from error
        except ValueError as error:
            if "Signature mismatch" not in str(error):
                raise refusal(f"is not a signature ({error})") from error
            raise refusal("the package was changed after it was signed") from error
        except Exception as error:  # a damaged bundle can raise any exception
            raise refusal(f"is not a signature ({type(error).__name__})") from error


def _hashing() -> "Hashing":
    from model_signing.hashing import Config

    return Config().use_file_serialization().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _public_key(key: str) -> "EllipticCurvePublicKey":
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise _missing(error) from error
    try:
        loaded = load_pem_public_key(key.encode())
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    if not isinstance(loaded, EllipticCurvePublicKey) or loaded.curve.name not in _CURVES:
        raise ValueError("not an elliptic key")
    return loaded


def public_pem(key: "EllipticCurvePublicKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _hint(key: "EllipticCurvePublicKey") -> str:
    return hashlib.sha256(public_pem(key)).hexdigest()


def _name(hint: str) -> str:
    return hint[:12] if hint.isalnum() else repr(hint[:12])


def _unusable(file: Path, reason: str, expected: str) -> ConfigurationError:
    return ConfigurationError(str(file), [Problem("key", reason, expected)])


def _missing(error: ImportError) -> DependencyError:
    remedy = "install it: pip install 'isthmus[signing]'"
    return DependencyError("signing", f"cannot be imported ({error})", remedy=remedy, passes=False)
