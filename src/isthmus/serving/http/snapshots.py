"""`/snapshots/SERVICE`: the stored features that devices keep, whole or as the difference from what a device has."""

from pathlib import Path

import pyarrow as pa
from starlette.responses import Response

from isthmus.features.errors import DataError
from isthmus.features.snapshot.shelf import Latest, Shelf
from isthmus.serving.wire.errors import NotFoundError, NotReadyError

KIND = "application/octet-stream"
_TRIES = 5


def read(folder: Path | None, service: str, since: str | None) -> tuple[Latest, bytes]:
    """What a device that has the snapshot `since`, by its SHA-256, is sent, and which snapshot it is then at.

    Nothing, if it has the newest. It blocks.

    Raises:
        NotFoundError: there is no snapshot of the service.
        NotReadyError: the files are damaged.
    """
    try:
        return _read(folder, service, since)
    except DataError as error:
        raise NotReadyError(error.where, error.found, remedy=error.remedy) from error


def _read(folder: Path | None, service: str, since: str | None) -> tuple[Latest, bytes]:
    shelf = None if folder is None else Shelf(folder / service)
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


def answer(latest: Latest, data: bytes, accepted: str, known: str) -> Response:
    """A response with the bytes for a device, compressed with Zstandard for whoever accepts that.

    Args:
        latest: the snapshot that the device is at then.
        data: the bytes; none if the device is there already.
        accepted: the request's `Accept-Encoding`.
        known: its `If-None-Match`.
    """
    tag = f'"{latest.snapshot}"'
    headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if not data or tag in known:
        return Response(status_code=304, headers=headers)
    # A difference is mostly changed numbers, which hardly get smaller.
    if "zstd" in accepted and not data.startswith(b"isthdiff"):
        data, headers["content-encoding"] = pa.compress(data, codec="zstd", asbytes=True), "zstd"
    return Response(data, media_type=KIND, headers=headers)
