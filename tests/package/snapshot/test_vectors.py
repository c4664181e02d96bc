"""The cases that all readers are held to, and Python by them. JavaScript: tests/end_to_end/test_snapshots.py."""

import json
import re
import subprocess
from typing import Any

import numpy as np
import pytest

from isthmus.features.clock import Row, as_of
from isthmus.features.contract.schema import Column
from isthmus.features.errors import DataError
from isthmus.features.types import TYPES
from isthmus.features.values.entitykey import encode_keys
from isthmus.features.values.rows import RowCodec
from isthmus.package.clients import CLIENT, CLIENTS, FOLDER
from isthmus.package.snapshot.delta import apply_delta
from isthmus.package.snapshot.file import SnapshotFile, read_snapshot, to_online_row
from isthmus.package.snapshot.signature import require_sealed
from tests.package.snapshot import vectors
from tests.package.snapshot.vectors import FIRST_FILE, SECOND_FILE, VIEWS, differences, refused, shown

VECTORS = json.loads(vectors.FILE.read_text(encoding="utf-8"))
STEPS = [(case["name"], step) for case in VECTORS["cases"] for step in case["steps"]]


def test_the_file_is_what_python_writes() -> None:
    assert vectors.vectors() == VECTORS, "run python -m tests.package.snapshot.vectors"


def _read(data: bytes) -> SnapshotFile:
    read = read_snapshot(data, VIEWS)
    require_sealed(read, VECTORS["key"])
    return read


def test_python_refuses_what_devices_refuse() -> None:
    """But for the age, the order and whose it is: those are a device's own."""
    for _, data, kind in refused():
        if kind in ("signature", "torn", "version"):
            with pytest.raises(DataError):
                _read(data)
    for _, delta, answer in differences():
        if answer == "newer":
            assert apply_delta(FIRST_FILE.data, delta) == SECOND_FILE.data
        else:
            with pytest.raises(DataError):
                _read(apply_delta(FIRST_FILE.data, delta))


@pytest.mark.parametrize("case", ["rows", "time", "types", "keys"])
def test_python_reads_the_same_rows(case: str) -> None:
    rows = [step for name, step in STEPS if name == case and step["do"] == "row" and step["answer"] != "key"]
    assert rows
    for step in rows:
        assert _row(step) == step["answer"]


def _row(step: dict[str, Any]) -> dict[str, Any]:
    """What the first file has, by the rules of time."""
    view = next(view for view in VIEWS if view.name == step["view"])
    kinds = {key.name: key.dtype.name for key in view.keys}
    keys = {name: [_key(text, kinds[name])] for name, text in step["keys"].items()}
    nothing = {column.name: None for column in view.fields}
    row = FIRST_FILE.rows[view.name].get(encode_keys(view.keys, keys)[0])
    if row is None:
        return {"status": "not_found", "event": None, "known": None, "values": nothing}
    block = RowCodec(view).decode([to_online_row(row, view)])
    event, known = int(block.event[0]), int(block.known[0])
    columns = [(column, block.columns[column.name]) for column in view.fields]
    values = {
        column.name: shown(_plain(data.data[0]), column.dtype) if data.valid[0] else None for column, data in columns
    }
    chosen, status = as_of([Row(event, known, 0, tuple(values.values()))], int(step["now"]), view.ttl)
    readable = nothing if chosen is None else values
    return {"status": status.label, "event": str(event), "known": str(known), "values": readable}


def _key(text: str, kind: str) -> Any:
    if kind == "Bytes":
        return bytes.fromhex(text)
    return text if kind == "String" else bool(int(text)) if kind == "Bool" else int(text)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


_LOOKUPS = """
import { readFileSync } from "node:fs";
const [client, vectors] = process.argv.slice(1);
const { Snapshots } = await import(client);
const { device, key } = JSON.parse(readFileSync(vectors));
const store = { get: async () => null };
const snapshots = await Snapshots.open({ device, key, store });
const [, { name: view, keys: [[whole]] }, { keys: [, [truth]] }] = device.views;
const answer = (view, keys) => {
  try {
    return snapshots.row(view, keys).status;
  } catch (error) {
    return error.message;
  }
};
const wrong = [" ", "0x10", true, 2 ** 53, 2n ** 63n, [5], 1.5];
const numbers = [...wrong, 7, 7n, "-7", -0].map((a) => answer(view, { a, b: "k0" }));
const others = { at: 0n, id: 0n, raw: new Uint8Array([97]) };
const flags = ["yes", "True", 2, NaN, true, 0, "1", false];
const truths = flags.map((flag) => answer(device.views[2].name, { ...others, flag }));
const texts = ["a", [97], 97, others.raw].map((raw) => answer(device.views[2].name, { ...others, flag: true, raw }));
console.log(JSON.stringify([whole, truth, numbers, truths, texts]));
"""


_AT_ONCE = """
import { readFileSync } from "node:fs";
const [client, vectors] = process.argv.slice(1);
const { Snapshots } = await import(client);
const { device, key, files, cases } = JSON.parse(readFileSync(vectors));
const bytes = (name) => new Uint8Array(Buffer.from(files[name], "base64"));
let stored = null;
let wait = 20;
const put = async (_, content) => {
  await new Promise((resolve) => setTimeout(resolve, (wait -= 15)));
  stored = content;
};
const now = () => BigInt(cases[0].steps[0].now);
const snapshots = await Snapshots.open({ device, key, now, store: { get: async () => stored, put } });
const done = await Promise.all(["first", "second"].map((name) => snapshots.accept(bytes(name))));
console.log(JSON.stringify([done, String(snapshots.state.header.number), Buffer.from(stored).equals(bytes("second"))]));
"""


def _node(script: str) -> Any:
    command = ["node", "--input-type=module", "-e", script, str(FOLDER / CLIENT), str(vectors.FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_javascript_takes_turns_where_there_are_no_locks() -> None:
    assert _node(_AT_ONCE) == [[True, True], "2", True]


def test_javascript_takes_nothing_for_a_key_that_is_none() -> None:
    whole, truth, numbers, truths, texts = _node(_LOOKUPS)
    assert (whole, truth) == ("a", "flag")
    shown = [" ", "0x10", "true", "9007199254740992", "9223372036854775808", "5", "1.5"]
    large = ["", "", "", *[" of 64 bits, as a BigInt"] * 2, "", ""]
    assert numbers == [
        *(f"the key a is {text}; expected a whole number{more}" for text, more in zip(shown, large, strict=True)),
        *["not_found"] * 4,
    ]
    assert truths == [
        *(f"the key flag is {text}; expected a truth value" for text in ("yes", "True", "2", "NaN")),
        *["not_found"] * 4,
    ]
    refused = [f"the key raw is {text}; expected bytes, as a Uint8Array" for text in ("a", "97", "97")]
    assert texts == [*refused, "not_found"]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_has_the_tags_and_widths_of_the_format(name: str) -> None:
    """What `make test` does not compile is read as text."""
    code = (FOLDER / name).read_text(encoding="utf-8")
    lines = [line for line in code.splitlines() if re.search(r"\b(tags|widths)\b.* = ", line, re.I)]
    tags, widths = (
        {kind: value for kind, value in re.findall(r'(\w+)"?(?:: | to )["\']?(\w+)', line) if kind in TYPES}
        for line in lines
    )
    edges = {kind: vectors.SCALARS[kind][-1] for kind in tags}
    keys = {kind: encode_keys([Column("k", TYPES[kind])], {"k": [edge]})[0] for kind, edge in edges.items()}
    assert tags == {kind: chr(key[0]) for kind, key in keys.items()}
    sizes = {kind: dtype.numpy for kind, dtype in TYPES.items() if dtype.numpy is not None}
    assert widths == {kind: str(np.dtype(numpy).itemsize) for kind, numpy in sizes.items()}
