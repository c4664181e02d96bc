// What a device does with questions: `node device.mjs ORT QUESTIONS` writes what it fed its models and what they answered.
//
// Beside it are the files of a package, the client of snapshots among them, and a snapshot, or those of several owners.
import { readFileSync } from "node:fs";
import { open } from "./model.mjs";
import { Predictor } from "./predict.mjs";
import { Snapshots } from "./snapshot.mjs";
import { all } from "./tensors.mjs";

const READ = { String: String, Bytes: (text) => new Uint8Array(Buffer.from(text, "base64")), Bool: Number, Float32: Number, Float64: Number };
const [runtime, questions] = process.argv.slice(2);
const ort = await import(runtime);
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
const read = (name) => readFileSync(new URL(name, import.meta.url));
const { contract, precisions, types, rows, snapshots: names, owner, key, now } = JSON.parse(readFileSync(questions));
const bytes = async (name) => new Uint8Array(read(name)).buffer;
const value = (name, text) => (text === null ? null : (READ[types[name]] ?? BigInt)(text));
const asked = rows.map((row) => Object.fromEntries(Object.entries(row).map(([name, text]) => [name, value(name, text)])));
const memory = new Map();
const store = { get: async (name) => memory.get(name) ?? null, put: async (name, data) => memory.set(name, data) };
const files = {};
const devices = new Map();
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
  const [first] = predictors.values();
  for (const [place, row] of asked.entries()) {
    const predictor = owner === null ? first : predictors.get(rows[place][owner]);
    const { by, why } = await predictor.predict(row);
    if (by !== "model") throw why;
  }
  files[opened.variant.file] = runs;
}
process.stdout.write(JSON.stringify(files));
