"""Redis's refusals in words of ours: what they mean, what to do, and whether waiting is enough."""

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import redis
from redis.exceptions import ClusterError, MovedError, RedisClusterException

# What Redis says of a command in a script comes with the script's own words around it, and in Redis 6 as ERR.
_IN_A_SCRIPT = re.compile(r"(?:-|: )(WRONGTYPE|OOM|READONLY|MISCONF|NOREPLICAS|MASTERDOWN|NOPERM) ")
_PHRASES = {
    "can't run this command or subcommand": "NOPERM",
    "ACL failure in script": "NOPERM",
    "AUTH called without any password": "UNEXPECTED",
    "AUTH <password> called without any password": "UNEXPECTED",
    "no password is set": "UNEXPECTED",
    "invalid password": "WRONGPASS",
    "unknown command 'AUTH'": "UNEXPECTED",
    "unknown command `AUTH`": "UNEXPECTED",
    "max number of clients reached": "MAXCLIENTS",
    "cluster support disabled": "NOCLUSTER",
    "Cluster mode is not enabled": "NOCLUSTER",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal explained: what Redis refuses and why, what to do, and whether waiting may be enough.

    In the remedy, `{setting}` stands for where its URL is configured.
    """

    found: str
    remedy: str
    passes: bool = False


_REFUSALS = {
    "OOM": Refusal("is out of memory and takes no writes", "raise its maxmemory, or remove what it need not hold"),
    "WRONGPASS": Refusal("does not accept the user and the password", "correct {setting}"),
    "NOAUTH": Refusal("asks for a password, and the URL has none", "name user and password in {setting}"),
    "UNEXPECTED": Refusal("takes no password, and the URL has one", "leave the password out of {setting}"),
    "NOPERM": Refusal(
        "does not allow its user this command", "allow it with ACL SETUSER, or name another user in {setting}"
    ),
    "READONLY": Refusal("is a replica and takes no writes", "name the primary in {setting}"),
    "MISCONF": Refusal(
        "cannot save to its disk and takes no writes", "free space there and see its log; it takes writes once it can"
    ),
    "MOVED": Refusal("is one node of a cluster", "begin the URL in {setting} with redis+cluster://"),
    "NOCLUSTER": Refusal("is no cluster", "begin the URL in {setting} with redis:// or rediss://"),
    "WRONGTYPE": Refusal(
        "has what another program wrote where Isthmus has a hash (WRONGTYPE)",
        "delete that key and run `isthmus materialize --full`, and give the other program a database of its own; "
        "or correct {setting} if it is another Redis",
    ),
    "LOADING": Refusal("was started and is still loading its rows", "wait until it has them", passes=True),
    "BUSY": Refusal("is busy with a script of another client", "wait until it is done, or end it", passes=True),
    "MASTERDOWN": Refusal("is a replica without its primary", "wait until it is back", passes=True),
    "NOREPLICAS": Refusal("has too few replicas and takes no writes", "wait until they are back", passes=True),
    "CLUSTERDOWN": Refusal("is a cluster that is not whole", "wait until every slot has a node again", passes=True),
    "TRYAGAIN": Refusal("is a cluster that is moving these rows", "wait until they are there", passes=True),
    "MAXCLIENTS": Refusal("has as many connections as it may have", "wait, or raise its maxclients", passes=True),
}

_UNTRUSTED = "name who vouches for it with ?ssl_ca_certs=FILE in {setting}, and the host by the name that it has there"
_NO_TLS = "begin the URL in {setting} with rediss:// where Redis speaks TLS, and with redis:// where it does not"


def refusal(error: BaseException) -> Refusal | None:
    """The refusal behind an error of redis-py, or behind its causes; None if Redis does not answer."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Refusal(f"shows a certificate that is not trusted ({cause.verify_message})", _UNTRUSTED)
        if isinstance(cause, ssl.SSLError):
            return Refusal(f"does not speak the TLS that was expected ({cause.reason or cause})", _NO_TLS)
        code = _code(cause)
        if code == "NOPERM":
            known = _REFUSALS[code]
            return Refusal(f"{known.found} ({words(cause)})", known.remedy)
        if code in _REFUSALS:
            return _REFUSALS[code]
    if isinstance(error, redis.ResponseError):
        return Refusal(f"refuses ({words(error)})", "see its message, and correct {setting} if it is another Redis")
    return None


def of_a_replica(reply: object) -> bool:
    """Whether a reply refuses a write because the server is a replica."""
    return isinstance(reply, redis.ResponseError) and _code(reply) == "READONLY"


def of_another_type(error: redis.ResponseError) -> bool:
    """Whether a command is refused because its key is no hash."""
    return _code(error) == "WRONGTYPE"


def only_writes(error: BaseException) -> bool:
    """Whether a refused PING means that only writes are refused: a Redis that cannot save still answers lookups."""
    return _code(error) == "MISCONF"


def words(error: BaseException) -> str:
    """The message of an error, without the command that a pipeline puts before it."""
    message = str(error).rpartition("of pipeline caused error: ")[2].strip().rstrip(".")
    return message or ("not in time" if isinstance(error, TimeoutError) else type(error).__name__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes: redis-py wraps the errors of cluster nodes and of sockets."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _code(error: BaseException) -> str:
    """The word that a refusal begins with, even if a script reports it."""
    if isinstance(error, MovedError):
        return "MOVED"
    if not isinstance(error, redis.RedisError | ClusterError | RedisClusterException):
        return ""
    text = str(error)
    code: str = getattr(error, "status_code", None) or text.partition(" ")[0]
    if code in _REFUSALS:
        return code
    if inside := _IN_A_SCRIPT.search(text):
        return inside[1]
    return next((meant for phrase, meant in _PHRASES.items() if phrase in text), code)
