"""Snapshots on a device: the reference client in a real browser, against a running server, offline, and killed."""

import json
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Page, Playwright, sync_playwright

from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.types import String
from isthmus.package.clients import FOLDER
from isthmus.package.snapshot.delta import difference
from isthmus.package.snapshot.file import LARGEST, Header, SnapshotFile
from isthmus.package.snapshot.owners import encode_owner, split_by_owner
from isthmus.package.snapshot.signature import SnapshotSigner
from isthmus.package.snapshot.store import Latest, SnapshotFolder
from tests.chromium import launch, launch_persistent
from tests.package.snapshot import vectors
from tests.package.snapshot.support import Content, made, sealer
from tests.package.snapshot.vectors import FILE, HOUR, MADE, MINUTE
from tests.serving.support import CONTRACT, serving

pytestmark = pytest.mark.browser

VIEWS = vectors.VIEWS[:2]
DEVICE = {**vectors.DEVICE, "views": vectors.DEVICE["views"][:2]}

EMPTY: Content = {}
CARRIER = Column("carrier", String)


def _snapshot(
    rows: Content, *, number: int = 1, at: int = MADE, every_type: Content = EMPTY, **header: Any
) -> SnapshotFile:
    file = made(VIEWS, [rows, every_type], number)
    fields = {name: getattr(file.header, name) for name in Header.__struct_fields__}
    fields |= {"service": "late", "made": at, **header}
    return sealer().seal(SnapshotFile(Header(**fields), file.rows))


def _rows(count: int, value: int = 0) -> Content:
    return {(f"c{n}",): (MADE - MINUTE, MADE - MINUTE, {"n": value + n, "text": "wet"}) for n in range(count)}


@dataclass
class Site:
    """A page's server, which passes what begins with /snapshots on to the API; `harm` changes what comes back.

    `files` are those of a host of files, by their paths; `asked` has the paths of all requests for them.
    """

    url: str
    shelf: SnapshotFolder
    harm: Callable[[bytes], bytes] = bytes
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    views: Sequence[ViewContract] = tuple(VIEWS)

    def offer(self, file: SnapshotFile, keep: int = 3) -> SnapshotFile:
        """Makes it the newest."""
        with self.shelf.locked():
            self.shelf.add(file, self.views, keep)
        return file

    def offer_owners(self, file: SnapshotFile, signer: SnapshotSigner) -> Latest:
        """Makes the files of its carriers the newest."""
        generation, own = split_by_owner(file.header, CARRIER, self.views, file.rows)
        with self.shelf.locked():
            return self.shelf.add_owners(generation, own, signer.sign, 3)

    def own(self, carrier: str) -> bytes:
        """The newest file of a carrier."""
        latest = self.shelf.latest()
        assert latest is not None
        found = self.shelf.owner_snapshot(encode_owner(carrier, CARRIER), latest)
        assert found is not None
        return found[1]


@contextmanager
def open_site(folder: Path, redis: str) -> Iterator[Site]:
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, redis, snapshots=str(folder / "snapshots")) as server:
        site = Site("", SnapshotFolder(folder / "snapshots" / "late"))

        class Handler(BaseHTTPRequestHandler):
            def handle(self) -> None:
                with suppress(ConnectionError):  # of a device that was killed
                    super().handle()

            def do_GET(self) -> None:
                if self.path.startswith("/snapshots/"):
                    known = {"if-none-match": self.headers.get("if-none-match", ""), "accept-encoding": "identity"}
                    answer = httpx.get(f"{server.http.base_url}{self.path}", headers=known)
                    status, body, kind = answer.status_code, site.harm(answer.content), "application/octet-stream"
                elif self.path.startswith("/files/"):
                    site.asked.append(self.path)
                    body, kind = site.files.get(self.path, b""), "application/octet-stream"
                    status = 200 if body else 404
                elif self.path.endswith(".mjs"):
                    status, body, kind = 200, (FOLDER / self.path[1:]).read_bytes(), "text/javascript"
                else:
                    status, body, kind = 200, b"<!doctype html><title>device</title>", "text/html"
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
            thread = Thread(target=http.serve_forever)
            thread.start()
            site.url = f"http://127.0.0.1:{http.server_port}/"
            try:
                yield site
            finally:
                http.shutdown()
                thread.join()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("site"), redis_url) as opened:
        yield opened


@pytest.fixture
def site(running: Site) -> Site:
    """With nothing on its shelf."""
    shutil.rmtree(running.shelf.folder, ignore_errors=True)
    running.harm = bytes
    return running


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as opened:
        yield opened


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """One browser for all of these; each test has a context of its own, as another person has."""
    browser = launch(playwright)
    yield browser
    browser.close()


OPEN = """async ({ device, key, now, url = "/snapshots/late", files = false, owner = null }) => {
  const { Snapshots } = await import("/snapshot.mjs");
  window.now = BigInt(now);
  window.snapshots = await Snapshots.open({ device, key, url, files, owner, now: () => window.now });
}"""
UPDATE = "() => snapshots.update().catch((error) => `${error.kind}: ${error.message}`)"
LOOKED = """(key) => {
  const { status, values } = snapshots.row("one", { carrier: key });
  return [status, values.n === null ? null : Number(values.n), values.text];
}"""
REQUIRED = (
    "() => { try { snapshots.require(); return 'fit'; } catch (error) { return `${error.kind}: ${error.message}`; } }"
)


def _open(page: Page, site: Site, at: int = MADE) -> None:
    if page.url != site.url:
        page.goto(site.url)
    page.evaluate(OPEN, {"device": DEVICE, "key": sealer().public_key, "now": str(at)})


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context()
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


def test_it_fetches_looks_up_goes_offline_ages_and_goes_on(site: Site, page: Page, context: BrowserContext) -> None:
    _open(page, site)
    assert page.evaluate(REQUIRED) == "none: this device has no snapshot yet"
    assert str(page.evaluate(UPDATE)).startswith("refused: the snapshot cannot be fetched: 404")
    site.offer(_snapshot(_rows(3)))
    assert page.evaluate(UPDATE) is True
    assert page.evaluate(UPDATE) is False
    assert page.evaluate(LOOKED, "c2") == ["present", 2, "wet"]
    assert page.evaluate(LOOKED, "c7") == ["not_found", None, None]
    assert page.evaluate(REQUIRED) == "fit"
    # Without a connection, and opened anew, it has what it had.
    context.set_offline(True)
    assert page.evaluate(UPDATE) == "offline: the snapshot cannot be fetched: there is no connection"
    _open(page, site, MADE + 30 * MINUTE)
    assert page.evaluate(LOOKED, "c2") == ["present", 2, "wet"]
    assert page.evaluate("() => Number(snapshots.age)") == 30 * MINUTE
    page.evaluate(f"() => {{ window.now = {MADE + HOUR}n; }}")
    assert page.evaluate(REQUIRED) == "fit"
    page.evaluate(f"() => {{ window.now = {MADE + HOUR + 1}n; }}")
    assert page.evaluate(REQUIRED) == (
        "age: the stored features are 60 minutes old, of 2023-11-14 22:13:20 UTC; this model may use 60 minutes"
    )
    # A row has a limit of its own.
    page.evaluate(f"() => {{ window.now = {MADE + 2 * HOUR}n; }}")
    assert page.evaluate(LOOKED, "c2") == ["expired", None, None]
    context.set_offline(False)
    site.offer(_snapshot(_rows(3, value=10), number=2, at=MADE + 2 * HOUR))
    assert page.evaluate(UPDATE) is True
    assert page.evaluate(REQUIRED) == "fit"


def test_it_goes_on_by_a_difference(site: Site, page: Page) -> None:
    _open(page, site)
    site.offer(_snapshot(_rows(500)))
    page.evaluate(UPDATE)
    fetched: list[int] = []
    site.harm = lambda body: fetched.append(len(body)) or body  # type: ignore[func-returns-value]
    newest = site.offer(
        _snapshot({**_rows(500), ("c7",): (MADE + 1, MADE + 1, {"n": -1, "text": None})}, number=2, at=MADE + 1)
    )
    assert page.evaluate(UPDATE) is True
    # The clock is a microsecond behind: then a question is of the snapshot's moment.
    assert page.evaluate(LOOKED, "c7") == ["present", -1, None]
    assert page.evaluate("() => snapshots.state.digest") == newest.digest
    assert len(fetched) == 1
    assert fetched[0] < len(newest.data) / 20


def test_a_device_has_the_rows_of_its_owner_alone(site: Site, page: Page, context: BrowserContext) -> None:
    site.offer_owners(_snapshot(_rows(3)), sealer())
    page.goto(site.url)
    options = {"device": {**DEVICE, "owner": "carrier"}, "key": sealer().public_key, "now": str(MADE)}
    with pytest.raises(Error, match="the snapshots of late are of one carrier each; expected that of this device"):
        page.evaluate(OPEN, options)
    with pytest.raises(Error, match="the snapshots of late are for all users; expected no owner"):
        page.evaluate(OPEN, {**options, "device": DEVICE, "owner": "c2"})
    page.evaluate(OPEN, {**options, "owner": "c2"})
    assert page.evaluate(UPDATE) is True
    assert page.evaluate(LOOKED, "c2") == ["present", 2, "wet"]
    with pytest.raises(Error, match="this device has the rows of carrier c2 alone; it was asked for c1"):
        page.evaluate(LOOKED, "c1")
    # It goes on by a difference.
    site.offer_owners(_snapshot(_rows(3, value=10), number=2), sealer())
    fetched: list[bytes] = []
    site.harm = lambda body: fetched.append(body) or body  # type: ignore[func-returns-value]
    assert page.evaluate(UPDATE) is True
    assert page.evaluate(LOOKED, "c2") == ["present", 12, "wet"]
    assert [body[:8] for body in fetched] == [b"isthdiff"]
    # The file of another is signed as well, and refused.
    site.offer_owners(_snapshot(_rows(3, value=20), number=3), sealer())
    other = site.own("c1")
    site.harm = lambda _: other
    assert page.evaluate(UPDATE) == "owner: the snapshot is of carrier c1; expected one of carrier c2"
    assert page.evaluate(LOOKED, "c2") == ["present", 12, "wet"]
    site.harm = bytes
    # After the user changes, nothing of the one before is used; without a connection there is nothing yet.
    context.set_offline(True)
    page.evaluate(OPEN, {**options, "owner": "c1"})
    assert page.evaluate(REQUIRED) == "none: this device has no snapshot yet"
    assert page.evaluate(UPDATE) == "offline: the snapshot cannot be fetched: there is no connection"
    assert page.evaluate(LOOKED, "c1") == ["not_found", None, None]
    page.evaluate(OPEN, {**options, "owner": "c2"})
    assert page.evaluate(LOOKED, "c2") == ["present", 12, "wet"]
    context.set_offline(False)
    # Whoever is no owner has no snapshot.
    page.evaluate(OPEN, {**options, "owner": "a/b %ü"})
    assert str(page.evaluate(UPDATE)).startswith("refused: the snapshot cannot be fetched: 404")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hash": "6" * 64}, "contract: the snapshot is of hash 666666666666; this model was made for 555555555555"),
        ({"project": "stage"}, "contract: the snapshot is of project stage; this model was made for prod"),
        ({"service": "early"}, "contract: the snapshot is of service early; this model was made for late"),
        ({"number": 0}, "older: the snapshot is of 2023-11-14 22:13:20 UTC; this device has had one"),
        ({"number": 1}, "older: the snapshot is of 2023-11-14 22:13:20 UTC; this device has had one"),
        ({"at": MADE + 8760 * HOUR}, "clock: the snapshot is of 2024-11-13 22:13:20 UTC, and this device says it is"),
    ],
)  # fmt: skip
def test_what_may_not_follow_is_refused_and_the_last_stays(site: Site, page: Page, change: Any, expected: str) -> None:
    _open(page, site)
    good = site.offer(_snapshot(_rows(3)))
    page.evaluate(UPDATE)
    site.offer(_snapshot(_rows(3, value=10), **{"number": 2, **change}), keep=0)
    assert str(page.evaluate(UPDATE)).startswith(expected)
    assert page.evaluate(LOOKED, "c2") == ["present", 2, "wet"]
    assert page.evaluate("() => snapshots.problem.message").startswith(expected.partition(": ")[2])
    _open(page, site)
    assert page.evaluate("() => snapshots.state.digest") == good.digest


def test_forged_torn_and_flipped_files_are_refused(site: Site, page: Page) -> None:
    _open(page, site)
    good = site.offer(_snapshot(_rows(3)))
    page.evaluate(UPDATE)
    site.offer(_snapshot(_rows(3, value=10), number=2))
    random = Random(0)

    def flipped(body: bytes) -> bytes:
        place = random.randrange(len(body)) if body else 0
        return body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :] if body else body

    for harm in (
        flipped,
        flipped,
        flipped,
        lambda body: body[: len(body) // 2],
        lambda _: b"",
        lambda _: b"<html>",
    ):
        site.harm = harm
        assert ":" in str(page.evaluate(UPDATE))
        assert page.evaluate(LOOKED, "c2") == ["present", 2, "wet"]
    site.harm = lambda _: bytes(LARGEST + 1)
    assert page.evaluate(UPDATE) == "size: the snapshot has more than 67108864 bytes"
    site.harm = bytes
    # Somebody else's key.
    other = _snapshot(_rows(3, value=10), number=3)
    site.offer(other.signed(bytes(64)), keep=0)
    assert str(page.evaluate(UPDATE)).startswith("signature: the snapshot is not signed by the key of this model")
    # What lies in the browser's own store is checked, too.
    for data in (good.data[:-10], good.data[:200] + b"x" + good.data[201:]):
        page.evaluate("async (bytes) => snapshots.store.put(snapshots.name, new Uint8Array(bytes))", list(data))
        _open(page, site)
        assert page.evaluate("() => snapshots.state") is None
        assert page.evaluate("() => snapshots.problem.kind") == "signature"


def test_a_clock_that_is_wrong_by_a_year_is_said(site: Site, page: Page) -> None:
    _open(page, site)
    site.offer(_snapshot(_rows(3)))
    page.evaluate(UPDATE)
    year = 365 * 24 * HOUR
    page.evaluate(f"() => {{ window.now = {MADE - year}n; }}")
    assert str(page.evaluate(REQUIRED)).startswith(
        "clock: the snapshot is of 2023-11-14 22:13:20 UTC, and this device says"
    )
    page.evaluate(f"() => {{ window.now = {MADE + year}n; }}")
    assert str(page.evaluate(REQUIRED)).startswith("age: the stored features are 365 days old")
    # Opened with a wrong clock, it still knows what it has had: nothing older takes its place.
    _open(page, site, MADE - year)
    assert str(page.evaluate(REQUIRED)).startswith("clock: the snapshot is of 2023-11-14 22:13:20 UTC")
    site.offer(_snapshot(_rows(3, value=10), number=0, at=MADE - year), keep=0)
    assert str(page.evaluate(UPDATE)).startswith("older: the snapshot is of 2022-11-14")


@pytest.mark.accept
def test_a_device_without_room_says_so_and_keeps_what_it_has(
    site: Site, playwright: Playwright, tmp_path: Path
) -> None:
    quota = {"origin": site.url.rstrip("/")}
    site.offer(_snapshot(_rows(3)))

    def opened(context: BrowserContext, **room: int) -> Page:
        page = context.new_page()
        # The quota of a real browser, by its own protocol: of an origin that has not been opened yet.
        context.new_cdp_session(page).send("Storage.overrideQuotaForOrigin", {**quota, **room})
        _open(page, site)
        return page

    with launch_persistent(playwright, tmp_path) as context:
        assert opened(context).evaluate(UPDATE) is True
    newer = site.offer(_snapshot(_rows(3, value=10), number=2))
    with launch_persistent(playwright, tmp_path) as context:
        page = opened(context, quotaSize=1)
        assert page.evaluate(UPDATE) == "store: the new snapshot cannot be stored: there is no room"
        assert page.evaluate(LOOKED, "c2") == ["present", 2, "wet"]
    with launch_persistent(playwright, tmp_path) as context:
        page = opened(context)
        assert page.evaluate(LOOKED, "c2") == ["present", 2, "wet"]
        assert page.evaluate(UPDATE) is True
        assert page.evaluate("() => snapshots.state.digest") == newer.digest


def test_two_pages_that_update_at_once_agree(site: Site, context: BrowserContext) -> None:
    pages = [context.new_page(), context.new_page()]
    for page in pages:
        _open(page, site)
    for number in range(1, 6):
        newest = site.offer(_snapshot(_rows(50, value=number), number=number))
        for page in pages:
            page.evaluate(f"() => {{ window.done = ({UPDATE})(); }}")
        answers = [page.evaluate("() => window.done") for page in pages]
        assert all(isinstance(answer, bool) for answer in answers), answers
        assert [page.evaluate("() => snapshots.state.digest") for page in pages] == [newest.digest] * 2


def test_a_host_of_files_is_asked_for_the_difference_first(site: Site, page: Page) -> None:
    """As `isthmus features snapshot --to` writes it."""
    first = _snapshot(_rows(500))
    site.files, site.asked = {"/files/late": first.data}, []
    page.goto(site.url)
    host = {"url": "/files/late", "files": True}
    page.evaluate(OPEN, {"device": DEVICE, "key": sealer().public_key, "now": str(MADE), **host})
    assert page.evaluate(UPDATE) is True
    second = _snapshot({**_rows(500), ("c7",): (MADE, MADE, {"n": -1, "text": None})}, number=2)
    delta = f"/files/late.{first.digest[:16]}"
    site.files |= {"/files/late": second.data, delta: difference(first, second)}
    assert page.evaluate(UPDATE) is True
    assert page.evaluate(LOOKED, "c7") == ["present", -1, None]
    assert site.asked == ["/files/late", delta]
    # Where there is none from what it has, it takes the file.
    site.files = {"/files/late": _snapshot(_rows(3, value=5), number=3).data}
    assert page.evaluate(UPDATE) is True
    assert page.evaluate(LOOKED, "c2") == ["present", 7, "wet"]


def test_a_missing_key_or_a_wrong_one_is_named(site: Site, page: Page) -> None:
    _open(page, site)
    site.offer(_snapshot(_rows(3)))
    page.evaluate(UPDATE)
    asked = "(keys) => { try { snapshots.row(...keys); } catch (error) { return `${error.kind}: ${error.message}`; } }"
    assert page.evaluate(asked, ["one", {}]) == "key: one needs the key carrier"
    assert page.evaluate(asked, ["every_type", {"a": "x", "b": "s"}]) == "key: the key a is x; expected a whole number"


def _value(random: Random, kind: str) -> Any:
    """A value of a type, with its edges."""
    match kind:
        case "Bool":
            return random.random() < 0.5
        case "Int32" | "Int64" | "UnixTimestamp":
            bits = 32 if kind == "Int32" else 63
            return random.choice([0, 1, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), random.getrandbits(bits - 1)])
        case "Float32":
            return float(np.frombuffer(struct.pack("<I", random.getrandbits(32)), "<f4")[0])
        case "Float64":
            return float(np.frombuffer(struct.pack("<Q", random.getrandbits(64)), "<f8")[0])
        case "String":
            return random.choice(["", "\0", "München", "東京", "🛫", "a" * random.randrange(40)])
        case "Bytes":
            return random.randbytes(random.randrange(6))
    return [_value(random, kind[6:-1]) for _ in range(random.randrange(4))]


SHOWN = """([keys]) => keys.map((key) => {
  const shown = (value) => {
    if (value === null) return null;
    if (Array.isArray(value)) return value.map(shown);
    if (value instanceof Uint8Array) return "y" + [...value].join();
    if (typeof value === "string") return "s" + value;
    if (typeof value === "bigint") return "i" + value;
    const bits = new DataView(new ArrayBuffer(8));
    bits.setFloat64(0, value);
    return Number.isNaN(value) ? "NaN" : "f" + bits.getBigUint64(0);
  };
  const { status, event, known, values } = snapshots.row("every_type", key);
  return [status, String(event), String(known), Object.values(values).map(shown)];
})"""


def _shown(value: Any, kind: str) -> Any:
    """The same of a value in Python."""
    if value is None:
        return None
    if isinstance(value, list):
        return [_shown(item, kind[6:-1]) for item in value]
    if kind == "Bytes":
        return "y" + ",".join(map(str, value))
    if kind == "String":
        return f"s{value}"
    if kind in ("Int64", "UnixTimestamp"):
        return f"i{value}"
    number = float(value)
    return "NaN" if number != number else f"f{struct.unpack('>Q', struct.pack('>d', number))[0]}"


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.accept)])
def test_rows_of_all_types_are_read_to_the_bit(site: Site, page: Page, count: int) -> None:
    random, view = Random(7), VIEWS[1]
    kinds = {column.name: column.dtype.name for column in view.fields}
    content = {
        (n, f"k{n}"): (MADE - n, MADE - n // 2, {
            name: None if random.random() < 0.1 else _value(random, kind) for name, kind in kinds.items()
        })
        for n in range(count)
    }  # fmt: skip
    site.offer(_snapshot(EMPTY, every_type=content))
    _open(page, site)
    assert page.evaluate(UPDATE) is True
    keys = [{"a": a, "b": b} for a, b in content]
    for begin in range(0, len(keys), 1000):
        found = page.evaluate(SHOWN, [keys[begin : begin + 1000]])
        for key, (status, event, known, values) in zip([*content][begin : begin + 1000], found, strict=True):
            row = content[key]
            assert (event, known) == (str(row[0]), str(row[1]))
            assert values == [_shown(row[2][name], kind) for name, kind in kinds.items()]
            assert status == ("null" if all(value is None for value in row[2].values()) else "present")


CASES = """async ({ key, device, manifests, files, cases }) => {
  const { Snapshots } = await import("/snapshot.mjs");
  const hex = (size, write) => {
    const view = new DataView(new ArrayBuffer(size));
    write(view);
    return Array.from(new Uint8Array(view.buffer), (byte) => byte.toString(16).padStart(2, "0")).join("");
  };
  const shown = (value, type) => {
    if (value === null) return null;
    if (Array.isArray(value)) return value.map((item) => shown(item, type.slice(6, -1)));
    if (type === "Float32") return hex(4, (view) => view.setFloat32(0, value));
    if (type === "Float64") return hex(8, (view) => view.setFloat64(0, value));
    if (type === "Bytes") return hex(value.length, (view) => new Uint8Array(view.buffer).set(value));
    return String(value);
  };
  const kinds = Object.fromEntries(device.views.flatMap(({ keys }) => keys));
  const fields = Object.fromEntries(device.views.flatMap(({ name, fields }) => fields.flatMap(([field, type]) => [
    [field, type], [`${name}__${field}`, type],
  ])));
  const texts = (values) => Object.fromEntries(
    Object.entries(values).map(([name, value]) => [name, shown(value, fields[name])]),
  );
  const micros = (time) => (time === null ? null : String(time));
  const bytes = (text) => Uint8Array.from(text.match(/../g), (digits) => parseInt(digits, 16));
  const file = (name) => Uint8Array.from(atob(files[name]), (letter) => letter.charCodeAt(0));
  const steps = {
    accept: async (snapshots, step) => ((await snapshots.accept(file(step.file))) ? "newer" : "same"),
    require: (snapshots) => snapshots.require() ?? "fit",
    row: (snapshots, step, keys) => {
      const { status, event, known, values } = snapshots.row(step.view, keys);
      return { status, event: micros(event), known: micros(known), values: texts(values) };
    },
    features: (snapshots, _, keys) => texts(snapshots.features(keys)),
  };
  const answers = [];
  for (const { name, of = null, owner = null, steps: taken } of cases) {
    let at;
    const stored = new Map();
    const store = {
      get: async (name) => stored.get(name) ?? null,
      put: async (name, content) => stored.set(name, content),
    };
    const options = { device: of ? JSON.parse(manifests[of]).device : device, key, url: "/", now: () => at, store };
    const value = (name, text) => (kinds[name] === "Bytes" && text !== null ? bytes(text) : text);
    const open = (owner) => Snapshots.open({ ...options, owner: value(of, owner) });
    let [whose, snapshots] = [owner, await open(owner)];
    for (const step of taken) {
      at = BigInt(step.now);
      const keys = Object.entries(step.keys ?? {}).map(([name, text]) => [name, value(name, text)]);
      let answer;
      try {
        if (step.do === "open") {
          [whose, snapshots] = [step.owner, await open(step.owner)];
          answer = "opened";
        } else {
          answer = await steps[step.do](snapshots, step, Object.fromEntries(keys));
        }
      } catch (error) {
        answer = error.kind ?? String(error);
      }
      answers.push([name, answer]);
    }
    at = 4_000_000_000_000_000n;
    const again = await open(whose);
    if (again.state?.digest !== snapshots.state?.digest) answers.push([name, "opened anew, it has another"]);
  }
  return answers;
}"""


def test_it_answers_in_all_cases_as_the_other_readers(site: Site, page: Page) -> None:
    known = json.loads(FILE.read_text(encoding="utf-8"))
    page.goto(site.url)
    expected = [[case["name"], step["answer"]] for case in known["cases"] for step in case["steps"]]
    assert page.evaluate(CASES, known) == expected


@pytest.mark.accept
def test_killed_at_any_moment_of_an_update_it_has_the_old_or_the_new(
    site: Site, playwright: Playwright, tmp_path: Path
) -> None:
    """Kill a browser 20 times while it updates as fast as it can, at moments on the scale of its own updates."""
    random, numbers, profile = Random(3), [], tmp_path / "profile"
    loop = f"() => {{ (async () => {{ for (;;) await ({UPDATE})(); }})(); }}"
    known: dict[str, int] = {}
    seconds = 0.0
    for turn in range(20):
        file = site.offer(_snapshot(_rows(2000, value=turn), number=turn + 1))
        known[file.digest] = turn + 1
        context = launch_persistent(playwright, profile)
        page = context.new_page()
        _open(page, site)
        had = page.evaluate("() => snapshots.state?.digest ?? null")
        problem = page.evaluate("() => snapshots.problem?.message ?? null")
        assert problem is None
        numbers.append(known.get(had, 0))
        if turn == 0:
            began = time.monotonic()
            assert page.evaluate(UPDATE) is True
            seconds = time.monotonic() - began
        page.evaluate(loop)
        time.sleep(random.uniform(0, 2 * seconds))
        for process in psutil.process_iter(["cmdline"]):
            if str(profile) in " ".join(process.info["cmdline"] or ()):
                process.send_signal(signal.SIGKILL)
        with suppress(Error):  # it is gone
            context.close()
    assert numbers == sorted(numbers)
    assert numbers[-1] > 5
