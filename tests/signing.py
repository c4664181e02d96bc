"""Keys to sign packages with, made by OpenSSL."""

import subprocess
from pathlib import Path


def pair(folder: Path, name: str, password: str = "") -> tuple[Path, Path]:
    """A private key, behind a password if one is given, and its public key."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    curve = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]
    locked = ["-aes-256-cbc", "-pass", f"pass:{password}"] if password else []
    subprocess.run(["openssl", "genpkey", *curve, *locked, "-out", str(private)], check=True, capture_output=True)
    opened = ["-passin", f"pass:{password}"] if password else []
    subprocess.run(["openssl", "pkey", "-in", str(private), *opened, "-pubout", "-out", str(public)], check=True)
    return private, public
