"""`/snapshots/SERVICE`: the stored features that devices keep, whole or as the difference from what a device has."""

import asyncio
from collections.abc import Collection
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from isthmus.features.errors import DataError, nearest, one_of
from isthmus.features.snapshot import delta
from isthmus.features.snapshot.shelf import Latest, Shelf
from isthmus.serving.http.guard import granted
from isthmus.serving.wire.errors import NotFoundError, NotReadyError
from isthmus.serving.wire.formats import accepts

KIND = "application/octet-stream"
_TRIES = 5


async def answer(request: Request, services: Collection[str], folder: str | None) -> Response:
    """What the device that asks is sent; nothing, with 304, if it has the newest.

    The whole file is compressed with Zstandard for whoever accepts that.

    Raises:
        NotFoundError: there is no such service, or no snapshot of it.
        NotReadyError: the files are damaged.
    """
    service = request.path_params["service"]
    granted(request).require("snapshot", service)
    if service not in services:
        raise NotFoundError("service", f"no service {service!r}{nearest(service, services)}", expected=one_of(services))
    shelf = None if folder is None else Shelf(Path(folder) / service)
    accepted = accepts(request.headers.get("accept-encoding", ""), "zstd")
    # In a thread: files, and the compression of large ones.
    latest, data, packed = await asyncio.to_thread(_read, shelf, service, request.query_params.get("since"), accepted)
    tag = f'"{latest.snapshot}"'
    headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if not data or tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=KIND, headers=headers | ({"content-encoding": "zstd"} if packed else {}))


def _read(shelf: Shelf | None, service: str, since: str | None, accepted: bool) -> tuple[Latest, bytes, bool]:
    """The newest, the bytes for a device that has `since`, none if that is the newest, and whether they are packed."""
    try:
        latest, data = _files(shelf, service, since)
    except DataError as error:
        raise NotReadyError(error.where, error.found, remedy=error.remedy) from error
    # A difference is mostly changed numbers, which hardly get smaller.
    packed = accepted and bool(data) and not data.startswith(delta.MAGIC)
    return latest, _packed(data) if packed else data, packed


def _packed(data: bytes) -> bytes:
    import pyarrow as pa

    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def _files(shelf: Shelf | None, service: str, since: str | None) -> tuple[Latest, bytes]:
    for _ in range(_TRIES):
        latest = None if shelf is None else shelf.latest()
        if shelf is None or latest is None:
            break
        if since == latest.snapshot:
            return latest, b""
        try:
            return latest, shelf.delta(since, latest) if since in latest.earlier else shelf.snapshot(latest.snapshot)
        except FileNotFoundError:
            continue  # a newer one has just taken its place
    raise NotFoundError(
        f"snapshot of {service}", "there is none", remedy="write it on the server: run `isthmus snapshot`"
    )
