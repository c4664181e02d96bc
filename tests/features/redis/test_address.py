import pytest
from redis.connection import parse_url

from isthmus.features.redis.address import Address

CLUSTER = "rediss+cluster://user:p%40%2Cw@one:1,two,[::1]:3?ssl_ca_certs=/a/b.pem"


def test_a_cluster_is_named_by_some_of_its_nodes() -> None:
    address = Address.of(CLUSTER)
    assert address.cluster
    assert [(node.host, node.port) for node in address.nodes()] == [("one", 1), ("two", 6379), ("::1", 3)]
    for url in (*address.urls, address.node("::2", 7), address.node("four", 8)):
        options = parse_url(url)  # type: ignore[no-untyped-call]
        assert url.startswith("rediss://")
        assert (options["username"], options["password"], options["ssl_ca_certs"]) == ("user", "p@,w", "/a/b.pem")
    assert address.node("::2", 7) == "rediss://user:p%40%2Cw@[::2]:7?ssl_ca_certs=/a/b.pem"
    assert address.node("four", 8) == "rediss://user:p%40%2Cw@four:8?ssl_ca_certs=/a/b.pem"
    assert CLUSTER not in repr(address)


@pytest.mark.parametrize("url", ["redis://h:1/2", "rediss://:p@h?ssl_cert_reqs=none", "unix:///a/b.sock?db=1"])
def test_one_server_keeps_its_url(url: str) -> None:
    assert Address.of(url) == Address(False, (url,))


@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://",
        "redis+cluster://h:1,",
        "redis+cluster://h:1,h:port",
        "redis+cluster://h:1,h:99999",
        "redis+cluster://h:1/3",
        "redis+cluster://h:1?db=3",
        "unix+cluster:///a/b.sock",
        "http+cluster://h:1",
        "redis-cluster://h:1",
        "http://redis+cluster://h:1",
        "redis+cluster://[::1",
        "+cluster://h",
        "",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Address.of(url)
