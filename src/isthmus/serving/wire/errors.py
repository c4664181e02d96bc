"""The errors of the API and their HTTP status codes."""

from collections.abc import Sequence

from isthmus.features.errors import ContractMismatch, DependencyError, IsthmusError, Problem, RequestError

RETRY_SECONDS = 1


class UnreadableError(RequestError):
    """The body is not valid UTF-8 JSON."""


class UnauthenticatedError(RequestError):
    """The request has no API key or an unknown one, or the server has no valid keys."""


class ForbiddenError(RequestError):
    """The API key lacks the scope for this request, or a web page of another site sent the request."""


class NotFoundError(RequestError):
    """The request names something that does not exist."""


class NotAllowedError(RequestError):
    """The path does not support this method."""


class NotAcceptableError(RequestError):
    """The caller does not accept any available format."""


class RowsError(RequestError):
    """Pushed rows were refused. Lists all problems; nothing was written."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        remedy = "nothing was written: fix this and push again"
        if len(self.problems) == 1:
            (problem,) = self.problems
            super().__init__(problem.where, problem.found, expected=problem.expected, remedy=remedy)
        else:
            listed = " | ".join(map(str, self.problems))
            super().__init__(where, f"{len(self.problems)} problems: {listed}", remedy=remedy)

    def as_dict(self) -> dict[str, object]:
        problems = [{"where": p.where, "found": p.found, "expected": p.expected} for p in self.problems]
        return {**super().as_dict(), "problems": problems}


class TooSlowError(RequestError):
    """The body did not arrive in time."""


class TooLargeError(RequestError):
    """The body is too long, or it asks for too many rows or values."""


class HeadTooLargeError(RequestError):
    """The head or the trailers of the request are too long, or have too many fields."""


class TooManyError(RequestError):
    """The API key exceeds its request rate."""


class NotReadyError(DependencyError):
    """The server cannot answer yet: a contract or model is not loaded, or the key file or a snapshot is damaged."""


class BusyError(DependencyError):
    """The server has too many requests in progress, or could not answer in time."""


class DefectError(IsthmusError):
    """The server has a bug."""


_STATUS: tuple[tuple[type[IsthmusError], int], ...] = (
    (UnreadableError, 400),
    (UnauthenticatedError, 401),
    (ForbiddenError, 403),
    (NotFoundError, 404),
    (NotAllowedError, 405),
    (NotAcceptableError, 406),
    (TooSlowError, 408),
    (ContractMismatch, 409),
    (TooLargeError, 413),
    (TooManyError, 429),
    (HeadTooLargeError, 431),
    (RequestError, 422),
    (DependencyError, 503),
)


def status(error: IsthmusError) -> int:
    return next((code for kind, code in _STATUS if isinstance(error, kind)), 500)


def headers(error: IsthmusError) -> dict[str, str]:
    match status(error):
        case 401:
            return {"www-authenticate": 'Bearer realm="isthmus"'}
        case 408:
            # More of the body may still arrive and must not be read as a new request.
            return {"connection": "close"}
        case 429 | 503 if not isinstance(error, DependencyError) or error.passes:
            return {"retry-after": str(RETRY_SECONDS)}
    return {}
