"""Keys to sign packages with."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa


def pair(folder: Path, name: str, password: str = "") -> tuple[Path, Path]:
    """Write an elliptic private key, encrypted if a password is given, and its public key."""
    return write_pair(folder, name, ec.generate_private_key(ec.SECP256R1()), password)


def write_pair(
    folder: Path, name: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, password: str = ""
) -> tuple[Path, Path]:
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem = serialization.Encoding.PEM
    locked: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        locked = serialization.BestAvailableEncryption(password.encode())
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, locked))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public
