// Predictions from keys and request fields. Check a package with `npm i onnxruntime-node` and `node predictor.mjs PACKAGE`.
// In a browser, import "onnxruntime-web" instead, and read the files with `fetch`.

import * as ort from "onnxruntime-node";

const ARRAYS = {
  bool: Uint8Array, uint8: Uint8Array, int32: Int32Array, int64: BigInt64Array, float: Float32Array, double: Float64Array,
};
const TYPES = { float: "float32", double: "float64" };

/** JSON in which whole numbers of 16 and more digits become BigInts: a number of JavaScript does not hold them all. */
function parse(text) {
  const exact = text.replace(/"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g, (part) => (/^-?\d{16,}$/.test(part) ? `{"whole":"${part}"}` : part));
  return JSON.parse(exact, (_, value) => (typeof value?.whole === "string" ? BigInt(value.whole) : value));
}

/** The nearest 32-bit number, rounded once. */
function nearest(whole) {
  const size = whole < 0n ? -whole : whole;
  if (size < 2n ** 53n) return Math.fround(Number(whole));
  const short = Math.fround(Number((size >> 11n) | (size & 0x7ffn ? 1n : 0n))) * 2048;
  return whole < 0n ? -short : short;
}

/** A value in the element type of its tensor. A UnixTimestamp is whole microseconds since 1970 UTC. */
function cast(value, { name, dtype }, element) {
  if (value === null) return { string: "", int64: 0n, float: NaN, double: NaN }[element] ?? 0;
  const isText = typeof value === "string";
  if (dtype === "String" ? !isText : isText && !["NaN", "Infinity", "-Infinity"].includes(value)) {
    throw new TypeError(`${name} is ${value}; expected a ${dtype}`);
  }
  if (dtype === "String") return value;
  if (dtype.startsWith("Float")) return Number(value);
  const whole = BigInt(value); // throws if the number is not an integer
  if (whole !== BigInt.asIntN(dtype === "Int32" ? 32 : 64, whole)) throw new RangeError(`${name} is ${value}, beyond ${dtype}`);
  return { int64: whole, float: nearest(whole) }[element] ?? Number(whole);
}

function castAll(value, input, element) {
  if (!input.size) return [cast(value, input, element)];
  if (value !== null && value.length !== input.size) throw new RangeError(`${input.name} has ${value.length} elements, not ${input.size}`);
  return Array.from({ length: input.size }, (_, n) => cast(value && value[n], { ...input, dtype: "Float32" }, element));
}

export class Predictor {
  /**
   * Opens the smallest model of a package in ORT format.
   *
   * @param read returns the bytes of a file of the package by its name, or a Promise of them.
   * @param api the address of `isthmus serve`, for `lookup`.
   * @param key an API key with the scope `read:*`, if the server asks for one.
   */
  static async open(read, { api = null, key = null } = {}) {
    const text = async (name) => new TextDecoder().decode(await read(name));
    const manifest = JSON.parse(await text("manifest.json"));
    const files = manifest.variants.filter(({ format }) => format === "ort");
    const { file, rounding } = files.reduce((best, one) => (one.bytes < best.bytes ? one : best));
    const session = await ort.InferenceSession.create(new Uint8Array(await read(file)));
    return Object.assign(new Predictor(), { manifest, file, rounding, session, api, key });
  }

  /**
   * Predicts one row: a number, or for a model of classes an object with the probability of each.
   *
   * @param keys join keys by name.
   * @param request the other inputs by name, null where there is no value.
   * @param stored the stored features: by default `lookup` fetches them; or `features` of a snapshot.
   * @returns null where a request feature is not defined for these values.
   */
  async predict(keys, request, stored = null) {
    const row = { ...keys, ...request, ...(stored ?? (await this.lookup(keys))) };
    const answers = await this.session.run(this.feeds(row));
    const numbers = [...answers[this.manifest.outputs[0].name].data];
    if (numbers.some(Number.isNaN)) return null;
    const { classes } = this.manifest;
    return classes ? Object.fromEntries(classes.map((name, n) => [name, numbers[n]])) : numbers[0];
  }

  /** Fetches the stored features of these keys, null where a key has no row or its row has expired. */
  async lookup(keys) {
    const types = new Map(this.manifest.inputs.filter(({ name }) => name.includes("__")).map(({ name, dtype }) => [name, dtype]));
    if (!types.size) return {};
    const features = [...types.keys()].map((name) => name.replace("__", ":"));
    const entities = Object.fromEntries(Object.entries(keys).map(([name, value]) => [name, [value]]));
    const answer = await fetch(`${this.api}/get-online-features`, {
      method: "POST",
      headers: this.key ? { authorization: `Bearer ${this.key}` } : {},
      body: JSON.stringify({ features, entities, full_feature_names: true }),
    });
    if (!answer.ok) throw new Error(`lookup: ${answer.status} ${await answer.text()}`);
    const { metadata, results } = parse(await answer.text());
    const stored = {};
    metadata.feature_names.forEach((name, n) => {
      const [value] = results[n].values;
      // The API has seconds, the model microseconds.
      if (types.has(name)) stored[name] = value !== null && types.get(name) === "UnixTimestamp" ? Math.round(value * 1e6) : value;
    });
    return stored;
  }

  /** The tensors of one row. */
  feeds(row) {
    const { inputs, tensors } = this.manifest;
    const missing = inputs.filter(({ name }) => row[name] === undefined).map(({ name }) => name);
    if (missing.length) throw new Error(`no value for ${[...new Set(missing)].join(", ")}; pass null where there is none`);
    return Object.fromEntries(tensors.map(({ name, element }) => {
      const isGiven = name.startsWith("given_");
      const values = name === "given_valid"
        ? inputs.filter(({ tensor }) => tensor.startsWith("given_")).map((input) => Number(row[input.name] !== null))
        : inputs.filter(({ tensor }) => tensor === name).flatMap((input) => castAll(row[input.name], input, element));
      const data = element === "string" ? values : ARRAYS[element].from(values);
      return [name, new ort.Tensor(TYPES[element] ?? element, data, isGiven ? [values.length, 1] : [1, values.length])];
    }));
  }
}

/** Predicts the golden rows of a package, and compares the answers with those recorded. */
async function check(read) {
  const model = await Predictor.open(read);
  const golden = parse(new TextDecoder().decode(await read("golden.json")));
  let [rows, worst] = [0, 0];
  for (const { rows: cases, outputs } of golden.cases) {
    const { data, shape } = outputs[model.file][model.manifest.outputs[0].name];
    const recorded = new Float32Array(Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)).buffer);
    const width = shape[1] ?? 1;
    for (const [n, values] of cases.entries()) {
      const answer = await model.predict({}, Object.fromEntries(golden.inputs.map((name, i) => [name, values[i]])), {});
      if (!rows) console.log("first golden row:", answer);
      const found = answer === null ? Array(width).fill(NaN) : typeof answer === "number" ? [answer] : Object.values(answer);
      found.forEach((number, i) => {
        const expected = recorded[n * width + i];
        if (!Object.is(number, expected)) worst = Math.max(worst, Number.isNaN(number - expected) ? Infinity : Math.abs(number - expected));
      });
      rows += 1;
    }
  }
  console.log(`${rows} golden rows, largest difference ${worst}`);
  if (worst > Math.max(model.manifest.rounding ?? 1e-5, model.rounding ?? 0)) throw new Error("the answers differ from those recorded");
}

if (globalThis.process?.argv[1]?.endsWith("predictor.mjs")) {
  const { readFile } = await import("node:fs/promises");
  await check((name) => readFile(`${process.argv[2] ?? "."}/${name}`));
}
