"""Object storage: what an error of it means, which is no damage of a table."""

from isthmus.features.errors import DependencyError, first_line

_SIGNS = ("Generic S3 error", "lacked the necessary privileges", "<Error><Code>", "Error performing ")
"""In what deltalake says of a storage that refuses or does not answer."""


def unavailable(where: str, place: str, error: BaseException) -> DependencyError | None:
    """The error to raise instead, if a storage refused a request or did not answer; None for any other error."""
    if "://" not in place or not any(sign in str(error) for sign in _SIGNS):
        return None
    return DependencyError(
        where, f"{place} is not available ({first_line(error)})",
        remedy="its rows are as they were: see storage_options, the bucket, and the credentials in the environment, "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; then run it again",
    )  # fmt: skip
