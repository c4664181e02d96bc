"""Signatures of packages, by OpenSSF Model Signing with a pair of elliptic keys.

A signature says who made a package; its sums say only that it is whole. It lies in the folder as `model.sig`, a
Sigstore bundle over the SHA-256 of every other file there. ECDSA draws a number for each signature, so the same package
has another one each time: it has no part in the sums, nor in what identifies the package.
"""

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.features.errors import ConfigurationError, DependencyError, PackageError, Problem
from isthmus.features.files import scratch_folder, write_atomically
from isthmus.features.package.checksums import SIGNATURE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from model_signing.hashing import Config as Hashing

PASSWORD = "ISTHMUS_SIGNING_PASSWORD"  # noqa: S105 - the name of the variable that holds it
"""The variable with the password of a private key."""

_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_LARGEST = 2**24
_PAIR = "an elliptic key in PEM, for example by `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256`"


class _KeyHint(msgspec.Struct):
    hint: str


class _Material(msgspec.Struct, rename="camel"):
    public_key: _KeyHint


class _Bundle(msgspec.Struct, rename="camel"):
    verification_material: _Material


class Signer:
    """Signs packages with a private key.

    Args:
        key: file of the key, in PEM.
        password: its password, if it has one. No message shows it.

    Raises:
        ConfigurationError: the file cannot be read, is no elliptic key, or the password is not its.
        DependencyError: the extra `signing` is not installed.
    """

    def __init__(self, key: Path, password: str | None = None) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
            from model_signing.signing import Config
        except ImportError as error:
            raise _missing(error) from error
        secret: Any = password.encode() if password else None
        try:
            loaded = load_pem_private_key(key.read_bytes(), secret)
        except OSError as error:
            raise _unusable(key, f"cannot be read ({error.strerror})", "the file of a private key") from error
        except TypeError as error:  # a password for a key that has none, or none for one that has
            if secret:
                raise _unusable(key, "has no password", f"no {PASSWORD}") from error
            raise _unusable(key, "has a password", f"it in {PASSWORD}") from error
        except Exception as error:  # OpenSSL's refusals are of many kinds
            found = f"is no private key that {PASSWORD} opens" if secret else "is no private key"
            raise _unusable(key, found, _PAIR) from error
        if not isinstance(loaded, EllipticCurvePrivateKey) or loaded.curve.name not in _CURVES:
            raise _unusable(key, "is a key of another kind", _PAIR)
        # Its types say that a password is a text, and it hands it on to a function that takes bytes.
        self._config = Config().use_elliptic_key_signer(private_key=key, password=secret)

    def sign(self, package: Path) -> None:
        """Writes the signature of a package into its folder; in place of one that is there."""
        # Beside the package: a server that reads it meanwhile would refuse a file that is half there.
        with scratch_folder(package.parent, f".{package.name}-signature") as scratch:
            file = scratch / SIGNATURE
            self._config.set_hashing_config(_hashing()).sign(package, file)
            write_atomically(file, file.read_bytes())
            file.replace(package / SIGNATURE)


def read_public_key(file: Path) -> str:
    """The public key in a file, as PEM.

    Raises:
        ConfigurationError: it cannot be read, or is no public elliptic key.
        DependencyError: the extra `signing` is not installed.
    """
    try:
        text = file.read_text(encoding="ascii")
        _public_key(text)
    except OSError as error:
        raise _unusable(file, f"cannot be read ({error.strerror})", "the file of a public key") from error
    except ValueError as error:
        raise _unusable(file, "is no public elliptic key", "`openssl pkey -in PRIVATE_KEY -pubout`") from error
    return text


def key_name(key: str) -> str:
    """What a message calls a public key, given as PEM: the beginning of its SHA-256."""
    return _name(_hint(_public_key(key)))


def require_signature(package: Path, key: str) -> None:
    """Refuses a package whose sums hold, but that the owner of a key has not signed as it is.

    Args:
        package: its folder.
        key: the public key, as PEM.

    Raises:
        PackageError: it is not signed, or not by this key, or not as it is.
        DependencyError: the extra `signing` is not installed.
    """
    try:
        public = _public_key(key)
    except ValueError as error:
        raise PackageError(f"package {package}", "is to be signed by what is no public key", expected="a key in PEM",
                           remedy="run `isthmus deploy` with the right packages.public_key") from error  # fmt: skip
    where, hint = str(package / SIGNATURE), _hint(public)
    expected = f"a signature by key {_name(hint)}"
    trust = "take the package from where it is signed, or sign it: export it with packages.signing_key"
    try:
        with (package / SIGNATURE).open("rb") as file:
            data = file.read(_LARGEST)
    except FileNotFoundError as error:
        raise PackageError(where, "missing: the package is not signed", expected=expected, remedy=trust) from error
    except OSError as error:
        raise PackageError(where, f"cannot be read ({error.strerror})", expected=expected, remedy=trust) from error
    try:
        signer = msgspec.json.decode(data, type=_Bundle).verification_material.public_key.hint
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PackageError(where, f"is no signature ({error})", expected=expected, remedy=trust) from error
    if signer != hint:
        raise PackageError(where, f"the package is signed by key {_name(signer)}", expected=expected, remedy=trust)
    _verify(package, data, public, where, expected, trust)


def _verify(package: Path, data: bytes, key: "EllipticCurvePublicKey", where: str, expected: str, trust: str) -> None:
    from cryptography.exceptions import InvalidSignature
    from model_signing.verifying import Config

    with tempfile.TemporaryDirectory() as folder:
        pem, signature = Path(folder) / "key.pem", Path(folder) / SIGNATURE
        pem.write_bytes(_pem(key))
        # What was read is what is verified.
        signature.write_bytes(data)
        config = Config().use_elliptic_key_verifier(public_key=pem).set_hashing_config(_hashing())
        try:
            config.verify(package, signature)
        except InvalidSignature as error:
            found = f"is no signature of key {_name(_hint(key))}, though it says so"
            raise PackageError(where, found, expected=expected, remedy=trust) from error
        except ValueError as error:
            if "Signature mismatch" not in str(error):
                raise PackageError(where, f"is no signature ({error})", expected=expected, remedy=trust) from error
            found = "the package has been altered since it was signed"
            raise PackageError(where, found, expected=expected, remedy=trust) from error
        except Exception as error:  # of a damaged bundle the library raises what comes
            found = f"is no signature ({type(error).__name__})"
            raise PackageError(where, found, expected=expected, remedy=trust) from error


def _hashing() -> "Hashing":
    from model_signing.hashing import Config

    return Config().use_file_serialization().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _public_key(key: str) -> "EllipticCurvePublicKey":
    """The key that a PEM holds.

    Raises:
        ValueError: it holds none, or one of another kind.
        DependencyError: the extra `signing` is not installed.
    """
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


def _pem(key: "EllipticCurvePublicKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _hint(key: "EllipticCurvePublicKey") -> str:
    """What a bundle says of the key."""
    return hashlib.sha256(_pem(key)).hexdigest()


def _name(hint: str) -> str:
    return hint[:12] if hint.isalnum() else repr(hint[:12])


def _unusable(file: Path, found: str, expected: str) -> ConfigurationError:
    return ConfigurationError(str(file), [Problem("key", found, expected)])


def _missing(error: ImportError) -> DependencyError:
    remedy = "install it: pip install 'isthmus[signing]'"
    return DependencyError("signing", f"cannot be imported ({error})", remedy=remedy, passes=False)
