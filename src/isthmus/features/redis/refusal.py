"""Explain Redis errors: what they mean, what to do, and whether waiting helps."""

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import redis
from redis.exceptions import ClusterError, MovedError, RedisClusterException

# Errors of commands inside a script are embedded in the script's error, and start with ERR in Redis 6.
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
    """An explained Redis error. `passes` is True if waiting may help. The caller replaces `{setting}` in the remedy."""

    problem: str
    remedy: str
    passes: bool = False


_REFUSALS = {
    "OOM": Refusal("is out of memory and takes no writes", "raise its maxmemory, or delete data that is not needed"),
    "WRONGPASS": Refusal("does not accept the user and the password", "correct {setting}"),
    "NOAUTH": Refusal("asks for a password, and the URL has none", "add the user and password to {setting}"),
    "UNEXPECTED": Refusal("takes no password, and the URL has one", "remove the password from {setting}"),
    "NOPERM": Refusal(
        "does not allow its user this command", "allow it with ACL SETUSER, or use another user in {setting}"
    ),
    "READONLY": Refusal("is a replica and takes no writes", "use the address of the primary in {setting}"),
    "MISCONF": Refusal(
        "cannot save to its disk and takes no writes",
        "free disk space and see its log; it takes writes again once it can save",
    ),
    "MOVED": Refusal("is one node of a cluster", "begin the URL in {setting} with redis+cluster://"),
    "NOCLUSTER": Refusal("is not a cluster", "begin the URL in {setting} with redis:// or rediss://"),
    "WRONGTYPE": Refusal(
        "has a key of Isthmus that another program overwrote with another type (WRONGTYPE)",
        "delete that key, run `isthmus materialize --full`, and use another database for the other program; "
        "or correct {setting} if this is the wrong Redis",
    ),
    "LOADING": Refusal("was started and is still loading its rows", "wait until they are loaded", passes=True),
    "BUSY": Refusal(
        "is busy with a script of another client", "wait until it is done, or kill it with SCRIPT KILL", passes=True
    ),
    "MASTERDOWN": Refusal("is a replica without its primary", "wait until it is back", passes=True),
    "NOREPLICAS": Refusal("has too few replicas and takes no writes", "wait until they are back", passes=True),
    "CLUSTERDOWN": Refusal("is a cluster with missing nodes", "wait until every slot has a node again", passes=True),
    "TRYAGAIN": Refusal("is a cluster that is moving these rows", "wait until they are moved", passes=True),
    "MAXCLIENTS": Refusal(
        "has reached its maximum number of connections", "wait, or raise its maxclients", passes=True
    ),
}

_UNTRUSTED = "give its authority with ?ssl_ca_certs=FILE in {setting}, and use the host name in its certificate"
_NO_TLS = "begin the URL in {setting} with rediss:// if Redis uses TLS, and with redis:// if it does not"


def explain(error: BaseException) -> Refusal | None:
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Refusal(f"shows a certificate that is not trusted ({cause.verify_message})", _UNTRUSTED)
        if isinstance(cause, ssl.SSLError):
            return Refusal(f"does not accept the TLS connection ({cause.reason or cause})", _NO_TLS)
        code = _code(cause)
        if code == "NOPERM":
            return Refusal(f"{_REFUSALS[code].problem} ({message_of(cause)})", _REFUSALS[code].remedy)
        if code in _REFUSALS:
            return _REFUSALS[code]
    if isinstance(error, redis.ResponseError):
        return Refusal(
            f"returned an error ({message_of(error)})",
            "see its message, and correct {setting} if this is the wrong Redis",
        )
    return None


def is_replica_error(reply: object) -> bool:
    return isinstance(reply, redis.ResponseError) and _code(reply) == "READONLY"


def is_type_error(error: redis.ResponseError) -> bool:
    return _code(error) == "WRONGTYPE"


def rejects_only_writes(error: BaseException) -> bool:
    return _code(error) == "MISCONF"


def message_of(error: BaseException) -> str:
    message = str(error).rpartition("of pipeline caused error: ")[2].strip().rstrip(".")
    return message or ("not in time" if isinstance(error, TimeoutError) else type(error).__name__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes. redis-py wraps the errors of cluster nodes and of sockets."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _code(error: BaseException) -> str:
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
    return next((code for phrase, code in _PHRASES.items() if phrase in text), code)
