"""The address of a Redis: the URL of a server, or of nodes of a cluster."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redis.cluster import ClusterNode

SCHEMES = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")
_CLUSTER = "+cluster://"


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """The parsed URL of a Redis.

    A cluster is named by one or more of its nodes, `redis+cluster://user:password@host:port,host:port?option=value`;
    user, password and options are those of every node.

    Attributes:
        cluster: whether it is a cluster, which knows the rest of its nodes.
        urls: a single URL, or one URL per node in the address.
    """

    cluster: bool
    urls: tuple[str, ...]

    @classmethod
    def of(cls, url: str) -> "Address":
        """Parses a URL; a ValueError may quote it, and with it the password."""
        # Late: a project with an embedded Redis has no URL, and many commands need no Redis.
        from redis.connection import parse_url

        scheme, separator, rest = url.partition(_CLUSTER)
        if not separator or "://" in scheme:
            parse_url(url)  # type: ignore[no-untyped-call]
            return cls(False, (url,))
        end = min((rest.index(mark) for mark in "/?#" if mark in rest), default=len(rest))
        credentials, at, hosts = rest[:end].rpartition("@")
        urls = tuple(f"{scheme}://{credentials}{at}{host}{rest[end:]}" for host in hosts.split(","))
        for node in urls:
            options = parse_url(node)  # type: ignore[no-untyped-call]
            if "host" not in options or "path" in options:
                raise ValueError("a node without a host")
            if options.get("db"):
                raise ValueError("a cluster has no databases but 0")
        return cls(True, urls)

    def nodes(self) -> "list[ClusterNode]":
        """The nodes of the address, as redis-py wants them."""
        from redis.cluster import ClusterNode
        from redis.connection import parse_url

        nodes = [parse_url(url) for url in self.urls]  # type: ignore[no-untyped-call]
        return [ClusterNode(node["host"], node.get("port", 6379)) for node in nodes]  # type: ignore[no-untyped-call]

    def node(self, host: str, port: int) -> str:
        """The URL of any node of the cluster: the first URL with this host and port."""
        scheme, _, rest = self.urls[0].partition("://")
        end = min((rest.index(mark) for mark in "/?#" if mark in rest), default=len(rest))
        credentials, at, _ = rest[:end].rpartition("@")
        return f"{scheme}://{credentials}{at}{f'[{host}]' if ':' in host else host}:{port}{rest[end:]}"


def without_credentials(url: str) -> str:
    """The URL without user, password and options, as it may be shown."""
    head, separator, tail = url.partition("://")
    scheme, rest = (head, tail) if separator else ("", url)
    place, *options = re.split(r"[?#]", rest)
    if any("@" in option for option in options):
        # An unescaped password, or a password among the options: nobody can say where it ends.
        return f"{scheme}{separator}..."
    return f"{scheme}{separator}{place.rpartition('@')[2]}"
