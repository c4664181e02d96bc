// `node greedy.mjs ORT GENERATE CASES` writes the greedy tokens of onnxruntime-web behind some prompts.
import { readFileSync } from "node:fs";

const [runtime, client, cases] = process.argv.slice(2);
const ort = await import(runtime);
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
const { Generator } = await import(client);
const { folder, file, prompts, most } = JSON.parse(readFileSync(cases));
const json = (name) => JSON.parse(readFileSync(`${folder}/${name}`));
const session = await ort.InferenceSession.create(readFileSync(`${folder}/${file}`), { executionProviders: ["wasm"] });
const generator = new Generator(ort, { manifest: json("manifest.json"), session }, json("tokenizer.json"));
const said = [];
for (const prompt of prompts) {
  const tokens = [];
  for await (const token of generator.tokens(prompt, most)) tokens.push(token);
  said.push(tokens);
}
const refused = [];
for (const prompt of [[], Array(384).fill(5)]) {
  try {
    await generator.tokens(prompt).next();
  } catch (error) {
    refused.push(error.message);
  }
}
process.stdout.write(JSON.stringify({ said, refused }));
