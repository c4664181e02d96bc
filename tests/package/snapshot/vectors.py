"""The cases that all readers of snapshots are held to: Python, JavaScript, Kotlin and Swift.

`python -m tests.package.snapshot.vectors` writes them to tests/fixtures/snapshots.json: files, and cases of steps.
Each case is a client that has nothing yet. A step says the time, what is done and the answer: of `accept` "newer",
"same" or the kind of the error, of `require` "fit" or the kind, of `row` and `features` what they have, or the kind.
A case with `of` is a client of an owner: of the device in that manifest, opened with the value `owner` of its join key.
The step `open` opens the client anew, with another owner or none, over what it has stored: "opened", or the kind.

Values are text: whole numbers in decimal, floats as the hexadecimal digits of their bits, bytes in hexadecimal.
"""

import base64
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, derive_private_key
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from isthmus.features.types import Bool, Bytes, DataType, Float32, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.entitykey import encode_keys
from isthmus.features.values.rows import HEADER as ROW_HEADER
from isthmus.features.values.rows import RowCodec
from isthmus.package.snapshot.delta import difference
from isthmus.package.snapshot.file import Header, SnapshotFile
from isthmus.package.snapshot.signature import SnapshotSigner
from tests.features.support import ALL, FIRST, LAST, make_view
from tests.package.snapshot.support import Content, made

FILE = Path(__file__).parents[2] / "fixtures" / "snapshots.json"

MADE, SECOND = 1_700_000_000_000_000, 1_000_000
MINUTE, HOUR = 60 * SECOND, 3600 * SECOND
SLACK = 5 * MINUTE
VIEWS = [
    make_view({"n": Int64, "text": String}, {"carrier": String}, ttl=2 * HOUR, name="one"),
    make_view(ALL, {"b": String, "a": Int32}, name="every_type"),
    make_view({"x": Float32}, {"flag": Bool, "at": UnixTimestamp, "raw": Bytes, "id": Int64}, name="every_key"),
]
DEVICE: dict[str, Any] = {
    "project": "prod", "service": "late", "hash": "5" * 64, "age": HOUR,
    "views": [
        {"name": view.name, "keys": sorted([key.name, key.dtype.name] for key in view.keys),
         "fields": [[column.name, column.dtype.name] for column in view.fields], "ttl": view.ttl}
        for view in VIEWS
    ],
}  # fmt: skip
"""What the manifest of a package says of these views."""

SEALER, STRANGER = (SnapshotSigner(derive_private_key(secret, SECP256R1())) for secret in (20, 21))
"""Keys that everybody knows, for tests alone."""

NULLS = (2**31 - 1, "東")
"""The key of a row whose features are null."""

NAN = struct.unpack("<f", bytes.fromhex("0000c07f"))[0]
SCALARS: Mapping[str, Sequence[Any]] = {
    "Bool": [True, False],
    "Int32": [-(2**31), 2**31 - 1, 0],
    "Int64": [-(2**63), 2**63 - 1, 2**53 + 1],
    "UnixTimestamp": [FIRST, LAST, -1],
    "Float32": [NAN, -0.0, float("-inf"), struct.unpack("<f", bytes.fromhex("01000000"))[0]],
    "Float64": [NAN, -0.0, 5e-324, 0.1, 1.7976931348623157e308],
    "String": ["", "\0", "\ufeffMünchen", "東京 🛫", 'a "quote" \\ /'],
    "Bytes": [b"", b"\0\xff", bytes(range(40))],
}


def shown(value: Any, dtype: DataType) -> Any:
    """A value as text."""
    match value:
        case None:
            return None
        case list():
            return [shown(item, dtype.element) for item in value]  # type: ignore[arg-type]
        case bool() | int():
            return str(int(value))
        case float():
            return struct.pack(">f" if dtype == Float32 else ">d", value).hex()
        case bytes():
            return value.hex()
    return value


def rows_of_all_types() -> Content:
    """Every edge of every type, and a row of nulls."""
    kinds = {name: SCALARS[dtype.name] if dtype.element is None else [
        list(SCALARS[dtype.element.name]), [], list(SCALARS[dtype.element.name][:1])
    ] for name, dtype in ALL.items()}  # fmt: skip
    rows: dict[tuple[Any, ...], Any] = {
        (n - 3, f"k{n}"): (MADE - n, MADE - n // 2, {name: edges[n % len(edges)] for name, edges in kinds.items()})
        for n in range(5)
    }
    rows[NULLS] = (MADE, MADE, dict.fromkeys(ALL))
    halves = {name: edges[0] if n % 2 else None for n, (name, edges) in enumerate(kinds.items())}
    rows[-(2**31), "x"] = (FIRST, MADE, halves)
    return rows


ONE: Content = {
    **{(f"c{n}",): (MADE - MINUTE, MADE - MINUTE, {"n": n, "text": "wet"}) for n in range(9)},
    ("half",): (MADE - MINUTE, MADE - MINUTE, {"n": None, "text": ""}),
    ("nulls",): (MADE - MINUTE, MADE - MINUTE, {"n": None, "text": None}),
    ("later",): (MADE + SECOND, MADE, {"n": 1, "text": "a"}),
    ("late",): (MADE, MADE + SECOND, {"n": 1, "text": "a"}),
    ("old",): (MADE - 2 * HOUR, MADE, {"n": 1, "text": "a"}),
    ("older",): (MADE - 2 * HOUR - 1, MADE, {"n": 1, "text": "a"}),
    ("ü",): (FIRST, FIRST, {"n": 1, "text": "a"}),
}
CHANGED: Content = {
    **ONE,
    ("c7",): (MADE + 1, MADE + 1, {"n": -1, "text": None}),
    ("new",): (MADE, MADE, {"n": 9, "text": "🛫"}),
}
EVERY_TYPE = rows_of_all_types()
EVERY_KEY: Content = {
    (-1, True, 2**63 - 1, b"\0\xff"): (MADE, MADE, {"x": 0.5}),
    (LAST, False, -(2**63), b"a"): (MADE, MADE, {"x": None}),
}


def sealed(body: bytes, sealer: SnapshotSigner = SEALER) -> bytes:
    """Bytes with a signature that is the same each time."""
    halves = decode_dss_signature(sealer.key.sign(body, ECDSA(SHA256(), deterministic_signing=True)))
    return body + b"".join(half.to_bytes(32) for half in halves)


def snapshot(
    one: Content = ONE, *, number: int = 1, at: int = MADE, every_key: Content = EVERY_KEY, **header: Any
) -> SnapshotFile:
    """A signed snapshot of these rows, and of all of the other views."""
    file = made(VIEWS, [one, EVERY_TYPE, every_key], number)
    fields = msgspec.structs.asdict(file.header) | {"service": "late", "made": at, **header}
    file = SnapshotFile(Header(**fields), file.rows)
    return file.signed(sealed(file.body)[-64:])


def own(name: str, value: Any, text: str, *, one: Content = ONE, **header: Any) -> SnapshotFile:
    """A signed snapshot of an owner: of the views with this join key, the rows of the value alone."""
    rows = []
    for view, content in zip(VIEWS, (one, EVERY_TYPE, EVERY_KEY), strict=True):
        names = sorted(key.name for key in view.keys)
        place = names.index(name) if name in names else None
        rows.append({key: row for key, row in content.items() if place is None or key[place] == value})
    return snapshot(rows[0], every_key=rows[2], **{"owner": (name, text), **header})


FIRST_FILE, SECOND_FILE = snapshot(), snapshot(CHANGED, number=2, at=MADE + SECOND)


OWN = {
    "own": own("carrier", "c2", "c2"),
    "own_newer": own("carrier", "c2", "c2", one={**ONE, ("c2",): CHANGED["c7",]}, number=2),
    "own_other": own("carrier", "c3", "c3", number=2),
    "own_other_newer": own("carrier", "c3", "c3", number=3),
    "own_of_another_key": own("carrier", "c2", "c2", number=2, owner=("id", "c2")),
    "own_umlaut": own("carrier", "ü", "ü"),
    "own_bytes": own("raw", b"\0\xff", "AP8="),
    "own_true": own("flag", True, "true"),
    "own_false": own("flag", False, "false"),
    "own_least": own("id", -(2**63), "-9223372036854775808"),
    "own_last": own("at", LAST, str(LAST)),
}
"""The files of owners."""


def reheaded(change: Callable[[bytes], bytes]) -> bytes:
    """The second file with another header, signed."""
    start, (size,) = 13, struct.unpack_from("<I", SECOND_FILE.data, 9)
    text = change(SECOND_FILE.body[start : start + size])
    return sealed(SECOND_FILE.body[:9] + struct.pack("<I", len(text)) + text + SECOND_FILE.body[start + size :])


def edited(place: int, fresh: bytes) -> bytes:
    """The second file with other bytes at a place of its rows, signed."""
    begin = 13 + struct.unpack_from("<I", SECOND_FILE.data, 9)[0] + place
    return sealed(SECOND_FILE.body[:begin] + fresh + SECOND_FILE.body[begin + len(fresh) :])


def refused() -> Iterator[tuple[str, bytes, str]]:
    """What may not follow the first file: its name, its bytes, and the kind of the error."""
    data, body = SECOND_FILE.data, SECOND_FILE.body
    yield "empty", b"", "signature"
    yield "page", b"<!doctype html><title>no snapshot</title>", "signature"
    yield "cut", data[:-1], "signature"
    yield "longer", data + b"\0", "signature"
    yield "flipped", data[:200] + bytes([data[200] ^ 1]) + data[201:], "signature"
    yield "unsigned", body + bytes(64), "signature"
    yield "stranger", sealed(body, STRANGER), "signature"
    yield "magic", sealed(b"x" + body[1:]), "torn"
    yield "short", sealed(body[:12]), "torn"
    yield "header_size", sealed(body[:9] + b"\xff\xff\xff\xff" + body[13:]), "torn"
    yield "header", reheaded(lambda text: text[:-1]), "torn"
    yield "header_text", reheaded(lambda text: text.replace(b"prod", b"p\xffod")), "torn"
    yield "rows_missing", sealed(body[:-1]), "torn"
    yield "rows_more", sealed(body + b"\0"), "torn"
    yield "count_less", reheaded(lambda text: text.replace(b'"every_key",2', b'"every_key",1')), "torn"
    yield "count_more", reheaded(lambda text: text.replace(b'"every_key",2', b'"every_key",3')), "torn"
    yield "key_tag", edited(0, b"i"), "torn"
    yield "key_size", edited(1, b"\xff\xff\xff\xff"), "torn"
    yield "row_size", edited(5 + 2 + 16 + 1 + 8, b"\xff\xff\xff\xff"), "torn"
    yield "version", sealed(body[:8] + b"\2" + body[9:]), "version"
    yield "project", snapshot(number=2, project="stage").data, "contract"
    yield "service", snapshot(number=2, service="early").data, "contract"
    yield "hash", snapshot(number=2, hash="6" * 64).data, "contract"
    yield "view", reheaded(lambda text: text.replace(b'"every_key"', b'"other_key"')), "contract"
    yield "view_less", reheaded(lambda text: text.replace(b',["every_key",2]', b"")), "contract"
    yield "number_less", snapshot(CHANGED, number=0).data, "older"
    yield "number_same", snapshot(CHANGED, number=1).data, "older"
    yield "future", snapshot(CHANGED, number=2, at=MADE + SLACK + 1).data, "clock"


def differences() -> Iterator[tuple[str, bytes, str]]:
    """What leads, or does not lead, from the first file to the second."""
    delta = difference(FIRST_FILE, SECOND_FILE)
    yield "delta", delta, "newer"
    yield "delta_other", difference(SECOND_FILE, FIRST_FILE), "torn"
    yield "delta_start", delta[:76], "torn"
    yield "delta_cut", delta[:-1], "torn"
    yield "delta_version", delta[:8] + b"\2" + delta[9:], "torn"
    yield "delta_target", delta[:41] + bytes(32) + delta[73:], "torn"
    yield "delta_size", delta[:73] + struct.pack("<I", len(SECOND_FILE.data) - 1) + delta[77:], "torn"
    yield "delta_huge", delta[:73] + b"\xff\xff\xff\xff" + delta[77:], "torn"
    yield "delta_copy", delta[:77] + b"\x03\xff\xff\xff\xff\x7f", "torn"
    yield "delta_number", delta[:77] + b"\xff\xff\xff\xff\xff\xff\x01", "torn"
    yield "delta_nothing", delta[:77], "torn"
    forged = FIRST_FILE.signed(bytes(64))
    yield "delta_forged", difference(FIRST_FILE, forged), "signature"


def row(view: int, key: tuple[Any, ...], status: str, content: Content, now: int = MADE) -> dict[str, Any]:
    """A step that looks a row up."""
    kept = VIEWS[view]
    columns = sorted(kept.keys, key=lambda column: column.name)
    keys = {column.name: shown(value, column.dtype) for column, value in zip(columns, key, strict=True)}
    event, known, values = content.get(key, (None, None, {}))
    readable = status in ("present", "null")
    answer = {
        "status": status,
        "event": event if event is None else str(event),
        "known": known if known is None else str(known),
        "values": {
            column.name: shown(values[column.name], column.dtype) if readable else None for column in kept.fields
        },
    }
    return {"do": "row", "now": str(now), "view": kept.name, "keys": keys, "answer": answer}


def features(*contents: Content) -> dict[str, Any]:
    """A step that looks the first key of each view up."""
    rows = [row(n, next(iter(content)), "present", content) for n, content in enumerate(contents)]
    keys = {name: text for step in rows for name, text in step["keys"].items()}
    values = {f"{step['view']}__{name}": text for step in rows for name, text in step["answer"]["values"].items()}
    return {"do": "features", "now": str(MADE), "keys": keys, "answer": values}


def accept(file: str, answer: str, now: int = MADE) -> dict[str, Any]:
    """A step that takes a file."""
    return {"do": "accept", "now": str(now), "file": file, "answer": answer}


def require(answer: str, now: int = MADE) -> dict[str, Any]:
    """A step that asks whether the snapshot may feed a model."""
    return {"do": "require", "now": str(now), "answer": answer}


def bad_row(view: int, kind: str, **keys: str) -> dict[str, Any]:
    """A step that looks up what cannot be read."""
    return {"do": "row", "now": str(MADE), "view": VIEWS[view].name, "keys": keys, "answer": kind}


def cases() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each case and its steps."""
    begin = accept("first", "newer")
    statuses = {
        "c2": "present", "half": "present", "nulls": "null", "none": "not_found", "later": "not_found",
        "late": "not_found", "old": "present", "older": "expired", "ü": "expired",
    }  # fmt: skip
    yield "rows", [begin, *(row(0, (key,), status, ONE) for key, status in statuses.items())]
    later = {
        "later": ("present", SECOND),
        "late": ("present", SECOND),
        "old": ("expired", 1),
        "c2": ("expired", 2 * HOUR),
    }
    yield "time", [begin, *(row(0, (key,), status, ONE, MADE + after) for key, (status, after) in later.items())]
    yield "types", [begin, *(row(1, key, "null" if key == NULLS else "present", EVERY_TYPE) for key in EVERY_TYPE)]
    yield "keys", [
        begin, row(2, (0, True, 0, b"a"), "not_found", EVERY_KEY),
        *(row(2, key, "null" if n else "present", EVERY_KEY) for n, key in enumerate(EVERY_KEY)),
        bad_row(0, "key"), bad_row(0, "key", carrier=""),
        *(bad_row(1, "key", a=a, b="x") for a in ("x", "1.5", str(2**63), str(-(2**63) - 1))),
    ]  # fmt: skip
    yield "features", [begin, features({("c2",): ONE["c2",]}, EVERY_TYPE, EVERY_KEY)]
    year = 365 * 24 * HOUR
    yield "age", [
        require("none"), begin, require("fit"), require("fit", MADE + HOUR), require("age", MADE + HOUR + 1),
        require("age", MADE + year), require("fit", MADE - SLACK), require("clock", MADE - SLACK - 1),
        require("clock", MADE - year),
    ]  # fmt: skip
    yield "newer", [
        begin, accept("first", "same"), accept("second", "newer"), accept("second", "same"), accept("first", "older"),
        # The clock is a second behind: then a question is of the snapshot's moment.
        row(0, ("new",), "present", CHANGED), row(0, ("c7",), "present", CHANGED),
    ]  # fmt: skip
    early = MADE - SLACK
    yield (
        "clock",
        [
            accept("first", "clock", early - 1),
            require("clock"),
            accept("first", "newer", early),
            row(0, ("c2",), "present", ONE, early),
        ],
    )
    for name, _, kind in refused():
        yield name, [begin, accept(name, kind), require("fit"), row(0, ("c7",), "present", ONE)]
    for name, _, answer in differences():
        yield name, [begin, accept(name, answer), row(0, ("c8",), "present", ONE)]
    yield "delta_from_nothing", [accept("delta", "torn")]
    yield "for_all", [opened("c2", "owner"), begin, accept("own_newer", "owner"), row(0, ("c7",), "present", ONE)]
    yield "text", [accept("text", "newer"), bad_row(0, "torn", carrier="c0")]
    yield "ends", [accept("ends", "newer"), bad_row(1, "torn", a="-3", b="k0")]


def cases_of_owners() -> Iterator[tuple[str, str, Any, list[dict[str, Any]]]]:
    """Each case of an owner: its name, the join key, the value, and the steps."""
    begin, here = accept("own", "newer"), row(0, ("c2",), "present", ONE)
    yield "own", "carrier", "c2", [
        begin, require("fit"), here, row(1, NULLS, "null", EVERY_TYPE), bad_row(0, "owner", carrier="c3"),
        bad_row(0, "key"), features({("c2",): ONE["c2",]}, EVERY_TYPE, EVERY_KEY), accept("own", "same"),
        accept("own_delta", "newer"), row(0, ("c2",), "present", {("c2",): CHANGED["c7",]}, MADE + 1),
    ]  # fmt: skip
    for name in ("own_other", "first", "own_of_another_key"):
        yield f"own_then_{name}", "carrier", "c2", [begin, accept(name, "owner"), require("fit"), here]
    yield "own_forged", "carrier", "c3", [accept("own_forged", "signature"), require("signature")]
    yield "own_delta_of_another", "carrier", "c2", [begin, accept("own_delta_of_another", "torn"), here]
    # What the user before has stored is neither used nor lost, and its number counts for nobody else.
    yield "own_changes", "carrier", "c3", [
        accept("own_other_newer", "newer"), opened("c2"), require("none"), accept("own_other", "owner"), begin, here,
        opened("c3"), row(0, ("c3",), "present", ONE), bad_row(0, "owner", carrier="c2"), accept("own_other", "older"),
    ]  # fmt: skip
    yield "own_missing", "carrier", "c2", [opened(None, "owner"), opened("", "owner"), opened("c2"), begin]
    yield "own_umlaut", "carrier", "ü", [accept("own_umlaut", "newer"), row(0, ("ü",), "expired", ONE)]
    first, last = EVERY_KEY
    for name, key, value, present in (
        ("own_bytes", "raw", b"\0\xff", first), ("own_true", "flag", True, first), ("own_false", "flag", False, last),
        ("own_least", "id", -(2**63), last), ("own_last", "at", LAST, last),
    ):  # fmt: skip
        absent = first if present is last else last
        asked = row(2, absent, "not_found", {})
        status = "null" if present is last else "present"
        steps = [accept(name, "newer"), row(2, present, status, EVERY_KEY), {**asked, "answer": "owner"}]
        yield name, key, value, steps


def opened(owner: str | None, answer: str = "opened") -> dict[str, Any]:
    """A step that opens the client of another owner, or of none."""
    return {"do": "open", "now": str(MADE), "owner": owner, "answer": answer}


def of_owners() -> Iterator[tuple[str, bytes]]:
    """The files of owners, and what leads from one to another."""
    yield from ((name, file.data) for name, file in OWN.items())
    yield "own_forged", OWN["own"].data.replace(b'"owner":["carrier","c2"]', b'"owner":["carrier","c3"]')
    yield "own_delta", difference(OWN["own"], OWN["own_newer"])
    yield "own_delta_of_another", difference(OWN["own_other"], OWN["own_other_newer"])


def unreadable() -> Iterator[tuple[str, bytes]]:
    """Files that are whole, with a row that is not."""
    body = SECOND_FILE.body
    yield "text", sealed(body.replace(b"wet", b"\xffet", 1))
    key = encode_keys(VIEWS[1].keys, {"a": [-3], "b": ["k0"]})[0]
    others = sum(column.dtype.numpy is None for column in VIEWS[1].fields)
    ends = body.index(key) + len(key) + 16 + RowCodec(VIEWS[1]).width - ROW_HEADER.size - 4 * others
    yield "ends", sealed(body[:ends] + b"\xff\xff\xff\xff" + body[ends + 4 :])


def vectors() -> dict[str, Any]:
    """The content of the file."""
    files = {"first": FIRST_FILE.data, "second": SECOND_FILE.data}
    files |= {name: data for name, data, _ in (*refused(), *differences())} | dict(unreadable()) | dict(of_owners())
    types = {key.name: key.dtype for view in VIEWS for key in view.keys}
    owners = [
        {"name": name, "of": key, "owner": shown(value, types[key]), "steps": steps}
        for name, key, value, steps in cases_of_owners()
    ]
    manifests = {key: json.dumps({"device": {**DEVICE, "owner": key}}) for _, key, _, _ in cases_of_owners()}
    return {
        "key": SEALER.public_key,
        "device": DEVICE,
        "manifests": manifests,
        "files": {name: base64.b64encode(data).decode() for name, data in files.items()},
        "cases": [*({"name": name, "steps": steps} for name, steps in cases()), *owners],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
