// Stored features on a device: fetched whole or as a delta, verified, stored, and read with their expiry.
//
// docs/snapshots.md describes the formats of snapshots and deltas.

const TAGS = { Bool: "b", Int32: "i", Int64: "i", UnixTimestamp: "t", String: "s", Bytes: "y" };
const WIDTHS = { Bool: 1, Int32: 4, Int64: 8, UnixTimestamp: 8, Float32: 4, Float64: 8 };
const TRUTHS = new Map([["true", 1], ["1", 1], ["false", 0], ["0", 0]]);
const SIGNATURE = 64;
const LARGEST = 2 ** 26;
const SLACK = 300_000_000n;
const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** The reason a snapshot is refused or cannot be used, in a sentence. `kind` is for programs. */
export class SnapshotError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

const text = (bytes) => {
  try {
    return decoder.decode(bytes);
  } catch {
    throw torn("a text is not UTF-8");
  }
};
const torn = (why) => new SnapshotError("torn", `the snapshot is torn or damaged: ${why}`);
const moment = (micros) => new Date(Number(micros / 1000n)).toISOString().slice(0, 19).replace("T", " ") + " UTC";

/** Describes a duration in microseconds. */
export function span(micros) {
  const seconds = Number(micros) / 1e6;
  for (const [unit, size] of [["days", 86400], ["hours", 3600], ["minutes", 60]]) {
    if (Math.abs(seconds) >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(seconds)} seconds`;
}

/** SHA-256 in hexadecimal. */
export async function sha256(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Checks that the owner of a public key (PEM) signed these bytes. */
export async function signed(bytes, key) {
  const der = Uint8Array.from(atob(key.replace(/-----[^-]+-----|\s/g, "")), (letter) => letter.charCodeAt(0));
  const algorithm = { name: "ECDSA", namedCurve: "P-256", hash: "SHA-256" };
  const owner = await crypto.subtle.importKey("spki", der, algorithm, false, ["verify"]);
  const end = bytes.length - SIGNATURE;
  return end > 0 && crypto.subtle.verify(algorithm, owner, bytes.subarray(end), bytes.subarray(0, end));
}

/** Offsets in a row: two times, null bits, values of fixed width, then the ends of the other values. */
function layout(view) {
  let place = 16 + Math.ceil(view.fields.length / 8);
  let others = 0;
  const fields = [];
  for (const [bit, [name, type]] of view.fields.entries()) {
    const fixed = type in WIDTHS;
    fields.push({ name, type, bit, place: fixed ? place : others++, fixed });
    if (fixed) place += WIDTHS[type];
  }
  return { fields, ends: place, others, width: place + 4 * others };
}

/**
 * Reads the header of a snapshot and its rows, by view and key, as DataViews.
 *
 * @param device `device` of a package's manifest.
 * @param owner expected owner, from `ownerOf`; null if all devices have the same rows.
 */
export function read(bytes, device, owner = null) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const end = bytes.length - SIGNATURE;
  if (end < 13 || String.fromCharCode(...bytes.subarray(0, 8)) !== "isthsnap") throw torn("it does not begin as one");
  if (bytes[8] !== 1) throw new SnapshotError("version", `the snapshot has version ${bytes[8]}; expected 1`);
  let place = 13 + view.getUint32(9, true);
  if (place > end) throw torn("it ends within its header");
  // A double cannot hold all digits of a number of microseconds.
  const json = text(bytes.subarray(13, place)).replace(/"(made|number)":(\d+)/g, '"$1":"$2"');
  let header;
  try {
    header = JSON.parse(json);
    Object.assign(header, { made: BigInt(header.made), number: BigInt(header.number) });
  } catch {
    throw torn("its header cannot be read");
  }
  for (const name of ["project", "service", "hash"]) {
    if (header[name] !== device[name]) {
      const [found, expected] = [header[name], device[name]].map((value) => String(value).slice(0, 12));
      throw new SnapshotError("contract", `the snapshot is of ${name} ${found}; this model was made for ${expected}`);
    }
  }
  const [found, expected] = [header.views.map(([name]) => name).join(", "), device.views.map(({ name }) => name).join(", ")];
  if (found !== expected) throw new SnapshotError("contract", `the snapshot is of views ${found}; expected ${expected}`);
  const [has, wanted] = [header.owner, owner && [owner.name, owner.text]].map((pair) => (pair ? `of ${pair.join(" ")}` : "for all users"));
  if (has !== wanted) throw new SnapshotError("owner", `the snapshot is ${has}; expected one ${wanted}`);
  const rows = new Map();
  for (const [number, [name, count]] of header.views.entries()) {
    const kept = device.views[number];
    const { ends, others, width } = layout(kept);
    const found = new Map();
    for (let n = 0; n < count; n++) {
      let begin = place;
      for (const [, type] of kept.keys) {
        if (begin >= end || bytes[begin] !== TAGS[type].charCodeAt(0)) throw torn(`no key of ${name} at byte ${begin}`);
        if (begin + 5 > end) throw torn("it ends within a key");
        begin += { b: 2, i: 9, t: 9 }[TAGS[type]] ?? 5 + view.getUint32(begin + 1, true);
      }
      if (begin + width > end) throw torn(`it ends within a row of ${name}`);
      const size = width + (others ? view.getUint32(begin + ends + 4 * (others - 1), true) : 0);
      if (begin + size > end) throw torn(`it ends within a row of ${name}`);
      found.set(latin(bytes.subarray(place, begin)), new DataView(bytes.buffer, bytes.byteOffset + begin, size));
      place = begin + size;
    }
    rows.set(name, found);
  }
  if (place !== end) throw torn("it has another length than its header says");
  return { header, rows };
}

const latin = (bytes) => Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");

const isMissing = (value) => value === undefined || value === null || value === "";

/** Encodes the key of a row: each join key in the order of the manifest. */
function keyOf(view, keys, owner) {
  const parts = view.keys.map(([name, type]) => {
    if (isMissing(keys[name])) throw new SnapshotError("key", `${view.name} needs the key ${name}`);
    const part = partOf(name, type, keys[name]);
    // This device does not have these rows, so "not found" would be wrong.
    if (owner?.name === name && part !== owner.key) {
      throw new SnapshotError("owner", `this device has the rows of ${name} ${owner.text} alone; it was asked for ${keys[name]}`);
    }
    return part;
  });
  return parts.join("");
}

/** Encodes a join key in the key of a row. */
function partOf(name, type, value) {
  const tag = TAGS[type];
  if (tag === "b") {
    if (!TRUTHS.has(`${value}`)) throw new SnapshotError("key", `the key ${name} is ${value}; expected a truth value`);
    return tag + String.fromCharCode(TRUTHS.get(`${value}`));
  }
  if (tag === "y" && !(value instanceof Uint8Array)) {
    // Its characters would become zeros, so all texts of one length would be the same key.
    throw new SnapshotError("key", `the key ${name} is ${value}; expected bytes, as a Uint8Array`);
  }
  if (tag === "s" || tag === "y") {
    const bytes = tag === "s" ? new TextEncoder().encode(value) : value;
    return tag + latin(new Uint8Array(new Uint32Array([bytes.length]).buffer)) + latin(bytes);
  }
  // A number from 2^53 on may have been rounded when it was parsed.
  const isWhole = typeof value === "bigint" || Number.isSafeInteger(value) || (typeof value === "string" && /^-?\d+$/.test(value));
  if (!isWhole || BigInt(value) !== BigInt.asIntN(64, BigInt(value))) {
    const large = Math.abs(Number(value)) >= 2 ** 53 ? " of 64 bits, as a BigInt" : "";
    throw new SnapshotError("key", `the key ${name} is ${value}; expected a whole number${large}`);
  }
  return tag + latin(new Uint8Array(new BigInt64Array([BigInt(value)]).buffer));
}

/** The owner of a device's snapshots: join key, value as text, and encoded value; null if all devices have the same rows. */
function ownerOf(device, value) {
  const name = device.owner;
  if (!name) {
    if (isMissing(value)) return null;
    throw new SnapshotError("owner", `the snapshots of ${device.service} are for all users; expected no owner`);
  }
  if (isMissing(value)) {
    throw new SnapshotError("owner", `the snapshots of ${device.service} are of one ${name} each; expected that of this device as owner`);
  }
  const [, type] = device.views.flatMap(({ keys }) => keys).find(([key]) => key === name);
  const key = partOf(name, type, value);
  const texts = {
    b: () => String(key.endsWith("\x01")),
    s: () => decoder.decode(new TextEncoder().encode(value)),
    y: () => btoa(latin(value)),
    i: () => String(BigInt(value)),
  };
  texts.t = texts.i;
  return { name, key, text: texts[TAGS[type]]() };
}

/** The value of a field, or null. */
function valueOf(row, { type, bit, place, fixed }, { ends, width }) {
  if ((row.getUint8(16 + (bit >> 3)) >> (bit & 7)) & 1) return null;
  if (fixed) return number(row, place, type);
  const [begin, end] = [place ? row.getUint32(ends + 4 * (place - 1), true) : 0, row.getUint32(ends + 4 * place, true)];
  if (begin > end || width + end > row.byteLength) throw torn("the ends within a row are out of order");
  const bytes = new Uint8Array(row.buffer, row.byteOffset + width + begin, end - begin);
  if (!type.startsWith("Array(")) return type === "String" ? text(bytes) : bytes;
  const element = type.slice(6, -1);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const items = [];
  for (let at = 0; at < bytes.length;) {
    const size = WIDTHS[element] ?? (at + 4 > bytes.length ? 4 : 4 + view.getUint32(at, true));
    if (at + size > bytes.length) throw torn("an array ends within an element");
    const part = bytes.subarray(at + 4, at + size);
    items.push(WIDTHS[element] ? number(view, at, element) : element === "String" ? text(part) : part);
    at += size;
  }
  return items;
}

function number(view, place, type) {
  switch (type) {
    case "Bool": return view.getUint8(place);
    case "Int32": return view.getInt32(place, true);
    case "Float32": return view.getFloat32(place, true);
    case "Float64": return view.getFloat64(place, true);
    default: return view.getBigInt64(place, true);
  }
}

/** Applies a delta to `base` and returns the new file. */
export async function applied(base, delta) {
  const view = new DataView(delta.buffer, delta.byteOffset, delta.byteLength);
  const hex = (begin) => Array.from(delta.subarray(begin, begin + 32), (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (delta.length < 77 || latin(delta.subarray(0, 8)) !== "isthdiff" || delta[8] !== 1) {
    throw torn("what was fetched is no difference");
  }
  if (hex(9) !== (await sha256(base))) throw torn("the difference is for another snapshot");
  const made = new Uint8Array(Math.min(view.getUint32(73, true), LARGEST));
  let [place, filled] = [77, 0];
  const next = () => {
    let value = 0;
    for (let shift = 0; shift < 35; shift += 7) {
      if (place >= delta.length) break;
      const byte = delta[place++];
      value += (byte & 127) * 2 ** shift;
      if (byte < 128) return value;
    }
    throw torn("the difference ends within a number");
  };
  while (place < delta.length) {
    const step = next();
    const count = Math.floor(step / 2);
    const [source, begin] = step % 2 ? [base, next()] : [delta, place];
    if (!(step % 2)) place += count;
    if (begin + count > source.length || filled + count > made.length) throw torn("the difference leads beyond its end");
    made.set(source.subarray(begin, begin + count), filled);
    filled += count;
  }
  if (filled !== made.length || hex(41) !== (await sha256(made))) throw torn("the difference does not lead to what it names");
  return made;
}

/** Reads a stream; throws if it is larger than a snapshot may be. */
async function limited(stream) {
  const parts = [];
  let size = 0;
  for (const reader = stream.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return new Uint8Array(await new Blob(parts).arrayBuffer());
    size += value.length;
    if (size > LARGEST) {
      await reader.cancel();
      throw new SnapshotError("size", `the snapshot has more than ${LARGEST} bytes`);
    }
    parts.push(value);
  }
}

/** Storage in IndexedDB, whose transactions are atomic. */
class Kept {
  static open() {
    return new Promise((resolve, reject) => {
      const asked = indexedDB.open("isthmus-snapshots", 1);
      asked.onupgradeneeded = () => asked.result.createObjectStore("snapshots");
      asked.onsuccess = () => resolve(new Kept(asked.result));
      asked.onerror = () => reject(new SnapshotError("store", `this browser keeps nothing (${asked.error?.name})`));
    });
  }

  constructor(database) {
    this.database = database;
  }

  get(name) {
    return new Promise((resolve, reject) => {
      const asked = this.database.transaction("snapshots").objectStore("snapshots").get(name);
      asked.onsuccess = () => resolve(asked.result ?? null);
      asked.onerror = () => reject(new SnapshotError("store", `the stored snapshot cannot be read: ${asked.error?.name}`));
    });
  }

  put(name, bytes) {
    return new Promise((resolve, reject) => {
      const writing = this.database.transaction("snapshots", "readwrite", { durability: "strict" });
      writing.oncomplete = () => resolve();
      writing.onabort = () => {
        const why = writing.error?.name === "QuotaExceededError" ? "there is no room" : writing.error?.name;
        reject(new SnapshotError("store", `the new snapshot cannot be stored: ${why}`));
      };
      writing.objectStore("snapshots").put(bytes, name);
    });
  }
}

/** Without the Web Locks API (Safari before 15.4), only updates within one page take turns. */
const TURNS = {
  last: Promise.resolve(),
  request(_, work) {
    const next = this.last.then(work);
    this.last = next.catch(() => {});
    return next;
  },
};

/**
 * The snapshots of a model's service on this device.
 *
 * `problem` is the reason the last fetched or stored snapshot was refused; the previous valid one stays in use.
 */
export class Snapshots {
  /**
   * Opens the snapshot stored on this device, if it is valid. `update` fetches a new one.
   *
   * @param device `device` of the package's manifest.
   * @param url address of the snapshot, on a server or as a file.
   * @param files true if deltas are files next to it, as written by `isthmus features snapshot --to`.
   * @param key public key in PEM that the snapshot must be signed with.
   * @param headers headers to send with each request, such as an API key.
   * @param now current time in microseconds since 1970 UTC, a BigInt.
   * @param store storage with `get` and `put`; default: IndexedDB.
   * @param owner value of the join key that `device` names as owner; only if it names one.
   */
  static async open({ device, url, files = false, key, headers = {}, now = () => BigInt(Date.now()) * 1000n, store = null, owner = null }) {
    const made = new Snapshots();
    const whose = ownerOf(device, owner);
    const place = whose ? `${url}/${encodeURIComponent(whose.text)}` : url;
    Object.assign(made, { device, url: place, files, key, headers, now, owner: whose, store: store ?? (await Kept.open()), state: null, problem: null });
    made.layouts = new Map(device.views.map((view) => [view.name, layout(view)]));
    // After a change of user, the previous user's snapshot is neither used nor in the way.
    made.name = [device.project, device.service, device.hash, ...(whose ? [whose.text] : [])].join("/");
    await made.adopt();
    return made;
  }

  /** Loads the stored snapshot, which another page may have replaced. */
  async adopt() {
    const kept = await this.store.get(this.name);
    if (!kept || (this.state && (await sha256(kept)) === this.state.digest)) return;
    try {
      this.state = await this.checked(new Uint8Array(kept), { timely: false });
    } catch (error) {
      this.problem = error;
    }
  }

  /**
   * Verifies that bytes are a snapshot for this device, not older than its current one.
   *
   * The number of the stored snapshot is remembered whatever the clock says, so that no older one can replace it.
   */
  async checked(bytes, { timely = true } = {}) {
    if (!(await signed(bytes, this.key))) {
      throw new SnapshotError("signature", "the snapshot is not signed by the key of this model, or was altered since");
    }
    const digest = await sha256(bytes);
    const { header, rows } = read(bytes, this.device, this.owner);
    const had = this.state?.header;
    if (had && (header.number < had.number || (header.number === had.number && digest !== this.state.digest))) {
      throw new SnapshotError("older", `the snapshot is of ${moment(header.made)}; this device has had one of ${moment(had.made)}`);
    }
    if (timely && header.made > this.now() + SLACK) {
      throw new SnapshotError("clock", `the snapshot is of ${moment(header.made)}, and this device says it is ${moment(this.now())}`);
    }
    return { bytes, digest, header, rows };
  }

  /**
   * Fetches a newer snapshot and returns true if there was one. One page at a time does so.
   *
   * Throws the reason if a newer snapshot cannot be used; the device then keeps its current one.
   */
  update() {
    return this.inTurn(() => this.fetched());
  }

  /** Uses a snapshot, or a delta from the current one, that came with the app or was pushed. */
  accept(bytes) {
    return this.inTurn(() => this.whole(bytes));
  }

  async inTurn(work) {
    return (globalThis.navigator?.locks ?? TURNS).request(`isthmus-snapshot ${this.name}`, async () => {
      await this.adopt();
      try {
        const bytes = await work();
        const state = bytes === null ? this.state : await this.checked(bytes);
        if (state === this.state || state.digest === this.state?.digest) {
          this.problem = null;
          return false;
        }
        await this.store.put(this.name, bytes);
        this.state = state;
        this.problem = null;
        return true;
      } catch (error) {
        this.problem = error;
        throw error;
      }
    });
  }

  /** Fetches the bytes of a newer snapshot or delta; null if there is none. */
  async fetched() {
    if (this.state) {
      const { digest } = this.state;
      const place = this.files ? `${this.url}.${digest.slice(0, 16)}` : `${this.url}?since=${digest}`;
      try {
        const answer = await this.ask(place, { "if-none-match": `"${digest}"` });
        if (answer === null) return null;
        return await this.whole(answer);
      } catch (error) {
        if (error.kind === "offline") throw error;
        // If the delta fails for any reason, fetch the whole file.
      }
    }
    return this.ask(this.url, {});
  }

  async whole(bytes) {
    return latin(bytes.subarray(0, 8)) === "isthdiff" ? applied(this.state?.bytes ?? new Uint8Array(), bytes) : bytes;
  }

  async ask(url, headers) {
    let answer, bytes;
    const offline = () => new SnapshotError("offline", "the snapshot cannot be fetched: there is no connection");
    try {
      // Without a digest to name, the browser asks with what it has of the host: a host of files has a tag of its own.
      const cache = headers["if-none-match"] ? "no-store" : "no-cache";
      answer = await fetch(url, { headers: { ...this.headers, ...headers }, cache });
    } catch {
      throw offline();
    }
    if (answer.status === 304) return null;
    if (!answer.ok) throw new SnapshotError("refused", `the snapshot cannot be fetched: ${answer.status} ${answer.statusText}`);
    try {
      bytes = await limited(answer.body);
    } catch (error) {
      throw error instanceof SnapshotError ? error : offline();
    }
    return bytes;
  }

  /** Age of the current snapshot in microseconds; null without one. */
  get age() {
    return this.state ? this.now() - this.state.header.made : null;
  }

  /** Throws unless the snapshot in use may feed the model now. */
  require() {
    if (!this.state) throw this.problem ?? new SnapshotError("none", "this device has no snapshot yet");
    const { made } = this.state.header;
    if (this.age < -SLACK) {
      throw new SnapshotError("clock", `the snapshot is of ${moment(made)}, and this device says it is ${moment(this.now())}`);
    }
    if (this.age > BigInt(this.device.age)) {
      const allowed = span(BigInt(this.device.age));
      throw new SnapshotError("age", `the stored features are ${span(this.age)} old, of ${moment(made)}; this model may use ${allowed}`);
    }
  }

  /** The time of a read: the time of the snapshot if this device's clock is slightly behind it. */
  get present() {
    const [at, made] = [this.now(), this.state?.header.made ?? 0n];
    return at < made && made - at <= SLACK ? made : at;
  }

  /** The row of a view for join keys by name: its status, times and values. */
  row(name, keys) {
    const at = this.present;
    const view = this.device.views.find((one) => one.name === name);
    const form = this.layouts.get(name);
    const key = keyOf(view, keys, this.owner);
    const row = this.state?.rows.get(name).get(key);
    const answer = { status: "not_found", event: null, known: null, values: {} };
    for (const field of form.fields) answer.values[field.name] = null;
    if (!row) return answer;
    const [event, known] = [row.getBigInt64(0, true), row.getBigInt64(8, true)];
    Object.assign(answer, { event, known });
    if (event > at || known > at) return answer;
    if (view.ttl !== null && at - event > BigInt(view.ttl)) return { ...answer, status: "expired" };
    for (const field of form.fields) answer.values[field.name] = valueOf(row, field, form);
    answer.status = Object.values(answer.values).every((value) => value === null) ? "null" : "present";
    return answer;
  }

  /** The stored features of a row of join keys, by the names of a model's inputs. */
  features(keys) {
    const found = {};
    for (const { name } of this.device.views) {
      for (const [feature, value] of Object.entries(this.row(name, keys).values)) found[`${name}__${feature}`] = value;
    }
    return found;
  }
}
