// Run a model file in onnxruntime-web: `node check.mjs ORT MODEL CASES` writes all outputs of each case as JSON.
import { readFileSync } from "node:fs";
import { tensor } from "./model.mjs";
import { all } from "./tensors.mjs";

const [runtime, ...files] = process.argv.slice(2);
const ort = await import(runtime);
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
const [model, cases] = files.map((file) => readFileSync(file));
const session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"] });
const answers = [];
for (const tensors of JSON.parse(cases)) {
  const feeds = Object.fromEntries(Object.entries(tensors).map(([name, of]) => [name, tensor(ort, of)]));
  answers.push(all(await session.run(feeds)));
}
process.stdout.write(JSON.stringify({ inputs: session.inputNames, outputs: session.outputNames, answers }));
