"""Redis addresses: the URL of a server, or of the nodes of a cluster."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redis.cluster import ClusterNode

SCHEMES = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")
_CLUSTER = "+cluster://"


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """The parsed URL of a Redis server, or of nodes of a Redis Cluster, which are enough to discover its other nodes.

    A cluster URL is `redis+cluster://user:password@host:port,host:port?option=value`. User, password and options apply
    to every node. `urls` has a URL for each node in it.
    """

    cluster: bool
    urls: tuple[str, ...]

    @classmethod
    def of(cls, url: str) -> "Address":
        """Parse the URL of a Redis server or cluster. Raise ValueError if it is invalid.

        Do not show the text of that error to users: it may contain the password.
        """
        # Imported late: with an embedded Redis there is no URL, and many commands need no Redis.
        from redis.connection import parse_url

        scheme, separator, tail = url.partition(_CLUSTER)
        if not separator or "://" in scheme:
            parse_url(url)  # type: ignore[no-untyped-call]
            return cls(False, (url,))
        end = min((tail.index(mark) for mark in "/?#" if mark in tail), default=len(tail))
        credentials, at, hosts = tail[:end].rpartition("@")
        urls = tuple(f"{scheme}://{credentials}{at}{host}{tail[end:]}" for host in hosts.split(","))
        for node in urls:
            options = parse_url(node)  # type: ignore[no-untyped-call]
            if "host" not in options or "path" in options:
                raise ValueError("a node without a host")
            if options.get("db"):
                raise ValueError("a cluster has only database 0")
        return cls(True, urls)

    def nodes(self) -> "list[ClusterNode]":
        from redis.cluster import ClusterNode
        from redis.connection import parse_url

        nodes = [parse_url(url) for url in self.urls]  # type: ignore[no-untyped-call]
        return [ClusterNode(node["host"], node.get("port", 6379)) for node in nodes]  # type: ignore[no-untyped-call]

    def node(self, host: str, port: int) -> str:
        scheme, _, tail = self.urls[0].partition("://")
        end = min((tail.index(mark) for mark in "/?#" if mark in tail), default=len(tail))
        credentials, at, _ = tail[:end].rpartition("@")
        return f"{scheme}://{credentials}{at}{f'[{host}]' if ':' in host else host}:{port}{tail[end:]}"


def without_credentials(url: str) -> str:
    head, separator, tail = url.partition("://")
    scheme, location = (head, tail) if separator else ("", url)
    place, *options = re.split(r"[?#]", location)
    if any("@" in option for option in options):
        # An unescaped password, or a password in the options: we cannot tell where it ends.
        return f"{scheme}{separator}..."
    return f"{scheme}{separator}{place.rpartition('@')[2]}"
