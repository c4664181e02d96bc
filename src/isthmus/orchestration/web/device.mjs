// Answer questions like a device: `node device.mjs ORT QUESTIONS` writes the inputs and outputs of the models as JSON.
//
// The folder of this file contains the files of a package, including the snapshot client, and one or more snapshots.
import { readFileSync } from "node:fs";
import { open } from "./model.mjs";
import { Predictor } from "./predict.mjs";
import { Snapshots } from "./snapshot.mjs";
import { all, kept } from "./tensors.mjs";

const READ = { String: String, Bytes: (text) => new Uint8Array(Buffer.from(text, "base64")), Bool: Number, Float32: Number, Float64: Number };
const [runtime, questions] = process.argv.slice(2);
const ort = await import(runtime);
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
const read = (name) => readFileSync(new URL(name, import.meta.url));
const { contract, precisions, types, rows, snapshots: names, owner, key, now, head } = JSON.parse(readFileSync(questions));
const bytes = async (name) => new Uint8Array(read(name)).buffer;
const value = (name, text) => (text === null ? null : Array.isArray(text) ? text.map(Number) : (READ[types[name]] ?? BigInt)(text));
const asked = rows.map((row) => Object.fromEntries(Object.entries(row).map(([name, text]) => [name, value(name, text)])));
const memory = new Map();
const store = { get: async (name) => memory.get(name) ?? null, put: async (name, data) => memory.set(name, data) };
const files = {};
const devices = new Map();
/** The entry for the owner of a row, or the only entry if all devices share one snapshot. */
const its = (all, place) => (owner === null ? all.values().next().value : all.get(rows[place][owner]));
for (const precision of precisions) {
  const opened = await open(ort, bytes, { contract, precision });
  for (const [text, name] of devices.size ? [] : Object.entries(names)) {
    const whose = owner === null ? {} : { owner: value(owner, text) };
    const snapshots = await Snapshots.open({ device: opened.manifest.device, key, now: () => BigInt(now), store, ...whose });
    await snapshots.accept(new Uint8Array(read(name)));
    devices.set(text, snapshots);
  }
  const runs = [];
  const run = async (feeds) => {
    const answers = await opened.session.run(feeds);
    runs.push({ fed: all(feeds), answers: all(answers) });
    return answers;
  };
  const of = (snapshots) => new Predictor(ort, { ...opened, session: { run } }, snapshots);
  const predictors = new Map([...devices].map(([text, snapshots]) => [text, of(snapshots)]));
  for (const [place, row] of asked.entries()) {
    const { by, why } = await its(predictors, place).predict(row);
    if (by !== "model") throw why;
  }
  files[opened.variant.file] = runs;
}
let core = null;
if (head) {
  // The inputs of the numeric core, for other runtimes.
  const { Head } = await import("./head.mjs");
  const made = new Head(read(head));
  const elements = JSON.parse(read(head)).outputs;
  core = asked.map((row, place) => {
    const { tensors, refused } = made.row({ ...row, ...its(devices, place).features(row) });
    const fed = elements.map(([name, type, slots]) => [name, kept({ type, dims: [1, slots.length], data: tensors[name] })]);
    return { fed: Object.fromEntries(fed), refused };
  });
}
process.stdout.write(JSON.stringify({ files, core }));
