"""Connect to Redis or Redis Cluster, and turn its errors into DependencyError."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.connection import parse_url
from redis.exceptions import RedisClusterException

from isthmus.features.errors import DependencyError
from isthmus.features.redis.address import SCHEMES, Address, without_credentials
from isthmus.features.redis.pipeline import Client
from isthmus.features.redis.refusal import Refusal, explain, message_of, rejects_only_writes

SETTING = "stores.online in isthmus.toml"


def connect(url: str, timeout: float = 5.0, setting: str = SETTING) -> Client:
    """Connect to the Redis server or Redis Cluster at a URL (see `Address`). The caller closes the client.

    Raise DependencyError if Redis does not answer or rejects the connection. A server that rejects writes only because
    it cannot save to its disk is accepted, since lookups still work. `timeout` limits each wait, also of later
    commands, in seconds. `setting` is the name of the setting that has the URL, for error messages.
    """
    options: dict[str, Any] = {"protocol": 2, "socket_timeout": timeout, "socket_connect_timeout": timeout}
    with translate_errors(url, setting):
        try:
            address = Address.of(url)
            if address.cluster:
                return redis.RedisCluster(url=address.urls[0], startup_nodes=address.nodes()[1:], **options)
            client = redis.Redis.from_url(url, **options)
            client.ping()
        except (ValueError, TypeError):
            # The parser's message and traceback contain the URL with the password: drop them.
            raise DependencyError(
                f"Redis at {without_credentials(url)}", "is not the URL of a Redis",
                expected=f"{', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}, with / ? # and @ in a password percent-encoded",
                remedy=f"correct {setting}" + _embedded(setting), passes=False,
            ) from None  # fmt: skip
        except redis.ResponseError as error:
            if not rejects_only_writes(error):
                raise
    return client


@contextmanager
def translate_errors(url: str, setting: str = SETTING) -> Iterator[None]:
    """Return a context manager that converts errors of Redis and its sockets to DependencyError, without the password.

    `url` is the URL of Redis, and `setting` the name of the setting that has it, for the message. Errors of files are
    not converted.
    """
    try:
        yield
    except (redis.RedisError, RedisClusterException, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # an error of a file, not of the connection
        embedded = _embedded(setting)
        start = f"start it{',' if embedded else ' or'} correct {setting}{embedded}"
        cause = explain(error) or Refusal(f"does not answer ({message_of(error)})", start, passes=True)
        remedy, text, shown = cause.remedy.replace("{setting}", setting), cause.problem, True
        for node in Address.of(url).urls:
            if password := parse_url(node).get("password"):  # type: ignore[no-untyped-call]
                # A Redis that does not know a command repeats its arguments in the error.
                text, shown = text.replace(password, "..."), shown and password not in str(error)
        raise DependencyError(
            f"Redis at {without_credentials(url)}", text, remedy=remedy, passes=cause.passes
        ) from (error if shown else None)  # fmt: skip


def _embedded(setting: str) -> str:
    return ', or set it to "embedded"' if setting == SETTING else ""
