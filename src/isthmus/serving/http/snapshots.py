"""`/snapshots/SERVICE`, and `/VALUE` after it: the stored features that devices keep, whole or as a difference."""

import asyncio
from collections.abc import Collection
from functools import partial
from pathlib import Path

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from isthmus.features.errors import DataError, RequestError, nearest, one_of
from isthmus.package.snapshot import delta
from isthmus.package.snapshot.owners import key_of, owner_column, value_of
from isthmus.package.snapshot.store import Latest, Shelf
from isthmus.serving.http.guard import granted
from isthmus.serving.wire.errors import NotFoundError, NotReadyError
from isthmus.serving.wire.formats import accepts

KIND = "application/octet-stream"
OWNER = "owner"
"""The kind of a parameter in a path that is the value of a join key: with slashes, as `path` has them."""

_TRIES = 5


class _Owner(PathConvertor):
    # Also with line breaks: without the last one of a value, a path would be that of another owner.
    regex = "(?s:.*)"


register_url_convertor(OWNER, _Owner())


async def answer(request: Request, services: Collection[str], folder: str | None) -> Response:
    """What the device that asks is sent; nothing, with 304, if it has the newest.

    The whole file is compressed with Zstandard for whoever accepts that.

    Raises:
        NotFoundError: there is no such service, no snapshot of it, or none of this owner.
        NotReadyError: the files are damaged.
        RequestError: the value of the owner has another type.
    """
    service, value = request.path_params["service"], request.path_params.get("value")
    if value is None:
        granted(request).require("snapshot", service)
    else:
        granted(request).require_owner(service, value)
    if service not in services:
        raise NotFoundError("service", f"no service {service!r}{nearest(service, services)}", expected=one_of(services))
    shelf = None if folder is None else Shelf(Path(folder) / service)
    accepted = accepts(request.headers.get("accept-encoding", ""), "zstd")
    ask = partial(_read, shelf, service, value, request.query_params.get("since"), accepted=accepted)
    # In a thread: files, and the compression of large ones.
    digest, data, packed = await asyncio.to_thread(ask)
    tag = f'"{digest}"'
    # What is an owner's stays out of the caches that others share.
    cache = "no-cache" if value is None else "private, no-cache"
    headers = {"etag": tag, "cache-control": cache, "vary": "accept-encoding"}
    if not data or tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=KIND, headers=headers | ({"content-encoding": "zstd"} if packed else {}))


def _read(
    shelf: Shelf | None, service: str, value: str | None, since: str | None, *, accepted: bool
) -> tuple[str, bytes, bool]:
    """SHA-256 of the newest, the bytes for a device that has `since`, none if that is it, whether they are packed."""
    try:
        digest, data = _files(shelf, service, value, since)
    except DataError as error:
        # Without the path of the file, which is the operator's.
        raise NotReadyError(f"snapshot of {service}", error.found, remedy=error.remedy) from error
    # A difference is mostly changed numbers, which hardly get smaller.
    packed = accepted and bool(data) and not data.startswith(delta.MAGIC)
    return digest, _packed(data) if packed else data, packed


def _packed(data: bytes) -> bytes:
    import pyarrow as pa

    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def _files(shelf: Shelf | None, service: str, value: str | None, since: str | None) -> tuple[str, bytes]:
    for _ in range(_TRIES):
        latest = None if shelf is None else shelf.latest()
        if shelf is None or latest is None:
            break
        try:
            if value is not None or latest.owner is not None:
                return _own(shelf, latest, service, value, since)
            if since == latest.snapshot:
                return latest.snapshot, b""
            whole = since not in latest.earlier
            return latest.snapshot, shelf.snapshot(latest.snapshot) if whole else shelf.delta(str(since), latest)
        except FileNotFoundError:
            continue  # a newer one has just taken its place
    raise NotFoundError(
        f"snapshot of {service}",
        "there is none",
        remedy="if the service declares a `device`, run `isthmus snapshot` on the server",
    )


def _own(shelf: Shelf, latest: Latest, service: str, value: str | None, since: str | None) -> tuple[str, bytes]:
    """As `_files`, of an owner."""
    where = f"snapshot of {service}"
    if latest.owner is None:
        raise NotFoundError(where, "is the same for all devices", remedy=f"ask for /snapshots/{service}")
    owner = owner_column(latest.owner)
    if value is None:
        remedy = f"ask for /snapshots/{service}/{owner.name.upper()}, with the value of the device's own {owner.name}"
        raise NotFoundError(where, f"there is one for each {owner.name}", remedy=remedy)
    try:
        key = key_of(value_of(value, owner.dtype), owner)
    except ValueError as error:
        raise RequestError(
            where, f"{value!r} is no {owner.name}",
            expected=f"a {owner.dtype.name} as in JSON, without quotes: /snapshots/{service}/{owner.name.upper()}",
        ) from error  # fmt: skip
    found = shelf.own(key, latest, since)
    if found is None:
        raise NotFoundError(
            where, f"there is none of {owner.name} {value}", expected=f"a {owner.name} that a table has rows of"
        )
    return found
