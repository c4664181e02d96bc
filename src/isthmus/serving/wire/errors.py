"""The errors of the API, and the HTTP status of each."""

from collections.abc import Sequence

from isthmus.features.errors import ContractMismatch, DependencyError, IsthmusError, Problem, RequestError

RETRY_SECONDS = 1


class UnreadableError(RequestError):
    """The body is no JSON in UTF-8."""


class UnauthenticatedError(RequestError):
    """The request carries no API key, or an unknown key."""


class ForbiddenError(RequestError):
    """The API key lacks the scope for this request."""


class NotFoundError(RequestError):
    """The request names something that does not exist."""


class NotAllowedError(RequestError):
    """The path does not take this method."""


class NotAcceptableError(RequestError):
    """The caller accepts no form of the answer."""


class RowsError(RequestError):
    """Rows that are refused: every problem at once, and nothing was written."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        remedy = "nothing was written: correct that and push again"
        if len(self.problems) == 1:
            (problem,) = self.problems
            super().__init__(problem.where, problem.found, expected=problem.expected, remedy=remedy)
        else:
            listed = " | ".join(map(str, self.problems))
            super().__init__(where, f"{len(self.problems)} problems: {listed}", remedy=remedy)

    def as_dict(self) -> dict[str, object]:
        """The error as plain data, with an entry for each problem."""
        problems = [{"where": p.where, "found": p.found, "expected": p.expected} for p in self.problems]
        return {**super().as_dict(), "problems": problems}


class TooSlowError(RequestError):
    """The body did not arrive in time."""


class TooLargeError(RequestError):
    """The body is too long, or it asks for too many rows or values."""


class HeadTooLargeError(RequestError):
    """The head of the request or its trailers are too long, or have too many fields."""


class TooManyError(RequestError):
    """The API key is used more often than it may be."""


class NotReadyError(DependencyError):
    """There is no contract or no model yet."""


class BusyError(DependencyError):
    """The server has as many requests under way as it may have, or could not answer in time."""


class DefectError(IsthmusError):
    """The server has a defect."""


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
    """The HTTP status of an error: 500 if neither the caller nor time can mend it."""
    return next((code for kind, code in _STATUS if isinstance(error, kind)), 500)


def headers(error: IsthmusError) -> dict[str, str]:
    """The headers of the answer to an error."""
    match status(error):
        case 401:
            return {"www-authenticate": 'Bearer realm="isthmus"'}
        case 408:
            # The rest of the body may come at any time, and is no request.
            return {"connection": "close"}
        case 429 | 503 if not isinstance(error, DependencyError) or error.passes:
            return {"retry-after": str(RETRY_SECONDS)}
    return {}
