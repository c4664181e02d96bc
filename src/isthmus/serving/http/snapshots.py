"""`/snapshots/SERVICE` and `/snapshots/SERVICE/VALUE`: snapshots for devices, whole or as deltas."""

import asyncio
from collections.abc import Collection
from functools import partial
from pathlib import Path

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from isthmus.features.errors import DataError, RequestError, did_you_mean, one_of
from isthmus.package.snapshot import delta
from isthmus.package.snapshot.owners import decode_key_text, encode_owner, owner_column
from isthmus.package.snapshot.store import Latest, SnapshotFolder
from isthmus.serving.http.guard import grants_of
from isthmus.serving.wire.errors import NotFoundError, NotReadyError
from isthmus.serving.wire.formats import accepts

KIND = "application/octet-stream"
OWNER = "owner"
"""Path parameter type for the value of a join key; like `path`, it may contain slashes."""

_TRIES = 5


class _Owner(PathConvertor):
    # Allow line breaks: dropping a trailing one would name another owner.
    regex = "(?s:.*)"


register_url_convertor(OWNER, _Owner())


async def answer(request: Request, services: Collection[str], folder: str | None) -> Response:
    """Handle `/snapshots/...`: send a device the newest snapshot of a service, or a delta to it.

    `services` are the names of services with snapshots. `folder` contains a folder for each of them, and is None
    without snapshots. The query's `since` is the SHA-256 of the snapshot on the device, from which a delta starts. The
    answer is 304 if the device has the newest snapshot. A whole snapshot is compressed with Zstandard if the client
    accepts it.

    Raises ForbiddenError without permission, RequestError for an invalid owner, NotFoundError for an unknown service or
    without a snapshot, and NotReadyError for damaged files.
    """
    service, value = request.path_params["service"], request.path_params.get("value")
    if value is None:
        grants_of(request).require("snapshot", service)
    else:
        grants_of(request).require_owner(service, value)
    if service not in services:
        raise NotFoundError(
            "service", f"no service {service!r}{did_you_mean(service, services)}", expected=one_of(services)
        )
    shelf = None if folder is None else SnapshotFolder(Path(folder) / service)
    accepted = accepts(request.headers.get("accept-encoding", ""), "zstd")
    ask = partial(_read, shelf, service, value, request.query_params.get("since"), accepted=accepted)
    # Use a thread to read files and compress large ones.
    digest, data, packed = await asyncio.to_thread(ask)
    tag = f'"{digest}"'
    # Keep owners' snapshots out of shared caches.
    cache = "no-cache" if value is None else "private, no-cache"
    headers = {"etag": tag, "cache-control": cache, "vary": "accept-encoding"}
    if not data or tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=KIND, headers=headers | ({"content-encoding": "zstd"} if packed else {}))


def _read(
    shelf: SnapshotFolder | None, service: str, value: str | None, since: str | None, *, accepted: bool
) -> tuple[str, bytes, bool]:
    """Return the newest snapshot's SHA-256, the bytes to send (empty if it is `since`), and True if compressed."""
    try:
        digest, data = _files(shelf, service, value, since)
    except DataError as error:
        # Hide the path of the file from the caller.
        raise NotReadyError(f"snapshot of {service}", error.found, remedy=error.remedy) from error
    # A delta consists mostly of changed numbers, which hardly compress.
    if not accepted or not data or data.startswith(delta.MAGIC):
        return digest, data, False
    import pyarrow as pa  # only the first request for a whole file pays for it

    return digest, bytes(pa.compress(data, codec="zstd", asbytes=True)), True


def _files(shelf: SnapshotFolder | None, service: str, value: str | None, since: str | None) -> tuple[str, bytes]:
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
            continue  # replaced by a newer one meanwhile
    raise NotFoundError(
        f"snapshot of {service}",
        "does not exist",
        remedy="if the service declares a `device`, run `isthmus features snapshot` on the server",
    )


def _own(
    shelf: SnapshotFolder, latest: Latest, service: str, value: str | None, since: str | None
) -> tuple[str, bytes]:
    where = f"snapshot of {service}"
    if latest.owner is None:
        raise NotFoundError(where, "is the same for all devices", remedy=f"request /snapshots/{service}")
    owner = owner_column(latest.owner)
    if value is None:
        remedy = f"request /snapshots/{service}/{owner.name.upper()}, with the value of the device's own {owner.name}"
        raise NotFoundError(where, f"differs by {owner.name}", remedy=remedy)
    try:
        key = encode_owner(decode_key_text(value, owner.dtype), owner)
    except ValueError as error:
        raise RequestError(
            where, f"{value!r} is not a valid {owner.name}",
            expected=f"a {owner.dtype.name} as in JSON, without quotes: /snapshots/{service}/{owner.name.upper()}",
        ) from error  # fmt: skip
    answer = shelf.owner_snapshot(key, latest, since)
    if answer is None:
        raise NotFoundError(
            where, f"does not exist for {owner.name} {value}", expected=f"a {owner.name} with rows in a table"
        )
    return answer
