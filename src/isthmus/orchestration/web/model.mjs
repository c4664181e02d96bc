// Reader of packages for browsers and Node: checksums, contract, golden cases, input tensors.

const KINDS = {
  bool: Uint8Array, uint8: Uint8Array, int32: Int32Array, int64: BigInt64Array, float: Float32Array, double: Float64Array,
};
const TYPES = { float: "float32", double: "float64" };
const TENSORS = {
  Bool: "bool", Int32: "int32", Int64: "int64", UnixTimestamp: "int64", Float32: "float", Float64: "double", String: "string",
};

export class PackageError extends Error {}

/** Convert a tensor of `golden.json` to a tensor of the runtime. */
export function tensor(ort, { element, shape, data = "", texts = [] }) {
  if (element === "string") return new ort.Tensor("string", texts, shape);
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  return new ort.Tensor(TYPES[element] ?? element, new KINDS[element](bytes.buffer), shape);
}

/**
 * Open a package. Check its checksums, its contract, and the answers of its model to the golden cases.
 *
 * @param ort onnxruntime-web.
 * @param read function that returns a Promise of the bytes (ArrayBuffer) of a file of the package, by its name.
 * @param precision precision of the model, "fp32" or "int8"; by default that of the smallest file.
 * @param contract hash of the contract that the app was built for; null accepts any.
 * @param tolerance largest allowed difference from the recorded answers; by default that between two processors.
 */
export async function open(ort, read, { precision = null, contract = null, tolerance = null } = {}) {
  const text = (bytes) => new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  const sums = new Map();
  for (const line of text(await read("SHA256SUMS")).split("\n").filter(Boolean)) {
    const [, digest, name] = /^([0-9a-f]{64})  ([^/\\]+)$/.exec(line) ?? [];
    if (!digest || name === "..") throw new PackageError(`SHA256SUMS: ${line} is not the checksum of a file`);
    sums.set(name, digest);
  }
  const checked = async (name) => {
    const bytes = await read(name);
    const digest = await crypto.subtle.digest("SHA-256", bytes);
    const found = [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    if (found !== sums.get(name)) throw new PackageError(`${name}: SHA-256 ${found}; expected ${sums.get(name)}`);
    return bytes;
  };
  const manifest = JSON.parse(text(await checked("manifest.json")));
  if (manifest.format_version !== 2) throw new PackageError(`format version ${manifest.format_version}; expected 2`);
  if (contract && manifest.contract !== contract) {
    throw new PackageError(`built for contract ${manifest.contract.slice(0, 12)}; expected ${contract.slice(0, 12)}`);
  }
  const variants = manifest.variants.filter((one) => one.format === "ort" && [null, one.precision].includes(precision));
  if (!variants.length) throw new PackageError(`no ${precision ?? ""} model in ORT format`);
  const variant = variants.reduce((best, one) => (one.bytes < best.bytes ? one : best));
  const model = new Uint8Array(await checked(variant.file));
  const session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"] });
  const golden = JSON.parse(text(await checked("golden.json")));
  const opened = { manifest, variant, session, golden, file: checked };
  opened.worst = await difference(ort, opened);
  // Negated, so that NaN fails.
  if (!(opened.worst <= (tolerance ?? Math.max(manifest.rounding ?? 1e-5, variant.rounding ?? 0)))) {
    throw new PackageError(`${variant.file}: answers differ from the recorded answers by ${opened.worst}`);
  }
  return opened;
}

/** Return the largest difference of the model's answers from `golden.json`, or NaN if a number is missing. */
export async function difference(ort, { session, golden, variant }) {
  let worst = 0;
  for (const { tensors, outputs } of golden.cases) {
    const feeds = Object.fromEntries(Object.entries(tensors).map(([name, kept]) => [name, tensor(ort, kept)]));
    const answers = await session.run(feeds);
    for (const [name, kept] of Object.entries(outputs[variant.file])) {
      const expected = tensor(ort, kept).data;
      const found = answers[name].data;
      if (found.length !== expected.length) return NaN;
      expected.forEach((value, place) => {
        const apart = value === found[place] ? 0 : Math.abs(Number(value) - Number(found[place]));
        worst = apart > worst || Number.isNaN(apart) ? apart : worst;
      });
      if (Number.isNaN(worst)) return NaN;
    }
  }
  return worst;
}

/**
 * Convert rows of raw values to the input tensors of a model of rows.
 *
 * @param manifest manifest of the package.
 * @param rows objects with a value for each input by name; null or absent for missing values. Whole numbers may be a
 *   BigInt; a UnixTimestamp is in microseconds since 1970 UTC.
 */
export function feeds(ort, manifest, rows) {
  const made = {};
  const elements = (input) => Array.from({ length: input.size }, (_, at) => ({ ...input, position: input.position + at, at }));
  const columns = (name) => manifest.inputs.filter((input) => input.tensor === name).flatMap((input) => (input.size ? elements(input) : [input]));
  for (const { name, size } of manifest.inputs) {
    const wrong = size && rows.find((row) => row[name] && row[name].length !== size);
    if (wrong) throw new RangeError(`${name} has ${wrong[name].length} elements, not ${size}`);
  }
  const numeric = columns("numeric");
  if (numeric.length) {
    const data = new Float32Array(rows.length * numeric.length);
    rows.forEach((row, n) => numeric.forEach(({ name, position, at }) => {
      data[n * numeric.length + position] = nearest((at === undefined ? row[name] : row[name]?.[at]) ?? NaN);
    }));
    made.numeric = new ort.Tensor("float32", data, [rows.length, numeric.length]);
  }
  const categories = columns("categories");
  if (categories.length) {
    const texts = rows.flatMap((row) => categories.map(({ name }) => row[name] ?? ""));
    made.categories = new ort.Tensor("string", texts, [rows.length, categories.length]);
  }
  // Booleans are uint8; in older packages they are bool.
  const truth = (name) => manifest.tensors.find((tensor) => tensor.name === name).element;
  const given = manifest.inputs.filter((input) => input.tensor.startsWith("given_"));
  for (const name of new Set(given.map((input) => input.tensor))) {
    const taken = columns(name);
    const element = TENSORS[taken[0].dtype];
    const values = taken.flatMap((input) => rows.map((row) => held(row[input.name], element)));
    const shape = [taken.length, rows.length];
    made[name] = element === "string"
      ? new ort.Tensor("string", values, shape)
      : new ort.Tensor(TYPES[element] ?? truth(name), KINDS[element].from(values), shape);
  }
  if (given.length) {
    const valid = given.flatMap((input) => rows.map((row) => Number((row[input.name] ?? null) !== null)));
    made.given_valid = new ort.Tensor(truth("given_valid"), Uint8Array.from(valid), [given.length, rows.length]);
  }
  return made;
}

/** Round to float32 once. Large BigInts are not exact as doubles, so their low bits are kept as a sticky bit. */
function nearest(value) {
  const size = typeof value === "bigint" ? BigInt.asUintN(64, value < 0n ? -value : value) : 0n;
  if (size < 2n ** 53n) return Math.fround(Number(value));
  const short = Math.fround(Number((size >> 11n) | (size & 0x7ffn ? 1n : 0n))) * 2048;
  return value < 0n ? -short : short;
}

/** Convert a value to the element type of its tensor. Nulls become any value. */
function held(value, element) {
  if (element === "string") return value ?? "";
  if (element === "int64") return BigInt(value ?? 0);
  return Number(value ?? 0);
}
