// Asks a model file for its golden cases in onnxruntime-web: `node check.mjs MODEL GOLDEN` writes all outputs as JSON.
import { readFileSync } from "node:fs";
import * as ort from "onnxruntime-web";
import { tensor } from "./model.mjs";

const TYPES = { float: "float32", double: "float64" };

function kept({ type, dims, data }) {
  const element = Object.keys(TYPES).find((name) => TYPES[name] === type) ?? type;
  if (element === "string") return { element, shape: dims, texts: data };
  return { element, shape: dims, data: Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("base64") };
}

ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
const [model, golden] = process.argv.slice(2).map((file) => readFileSync(file));
const session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"] });
const answers = [];
for (const { tensors } of JSON.parse(golden).cases) {
  const feeds = Object.fromEntries(Object.entries(tensors).map(([name, of]) => [name, tensor(ort, of)]));
  const found = await session.run(feeds);
  answers.push(Object.fromEntries(Object.entries(found).map(([name, of]) => [name, kept(of)])));
}
process.stdout.write(JSON.stringify({ inputs: session.inputNames, outputs: session.outputNames, answers }));
