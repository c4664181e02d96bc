"""Which HTTP status an error is answered with."""

from isthmus.features.errors import ContractMismatch, DependencyError, IsthmusError, RequestError

RETRY_SECONDS = 1


class UnreadableError(RequestError):
    """The body is no JSON in UTF-8."""


class NotFoundError(RequestError):
    """The request names something that is not there."""


class NotAllowedError(RequestError):
    """The path does not take this method."""


class TooLargeError(RequestError):
    """The body is too long, or it asks for too many rows."""


class NotReadyError(DependencyError):
    """There is no contract or no model yet."""


class DefectError(IsthmusError):
    """The server has a defect."""


_STATUS: tuple[tuple[type[IsthmusError], int], ...] = (
    (UnreadableError, 400),
    (NotFoundError, 404),
    (NotAllowedError, 405),
    (ContractMismatch, 409),
    (TooLargeError, 413),
    (RequestError, 422),
    (DependencyError, 503),
)


def status(error: IsthmusError) -> int:
    """The HTTP status of an error: 500 for what neither the caller nor time can mend."""
    return next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
