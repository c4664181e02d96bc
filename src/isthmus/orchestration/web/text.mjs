// A form for any causal language model. It writes text token by token, and has a field for each feature in the prompt.

import { begin, show } from "./begin.mjs";
import { fields, Generator } from "./generate.mjs";

begin(async ({ ort, opened }) => {
  const { manifest, variant } = opened;
  const { generation } = manifest;
  const json = async (name) => JSON.parse(new TextDecoder().decode(await opened.file(name)));
  const generator = new Generator(ort, opened, await json(generation.tokenizer ?? "tokenizer.json"));
  const prompts = await json(generation.prompts ?? "prompts.json");
  for (const { text, features, tokens } of prompts) {
    const found = generator.encode(text, features);
    if (found.join() !== tokens.join()) throw new Error(`tokens of ${JSON.stringify(text)}: ${found}; expected ${tokens}`);
  }
  show("good", `${prompts.length} prompts have the recorded tokens`);
  const [{ tokens, answers }] = prompts;
  const recorded = answers[variant.file];
  const said = [];
  for await (const token of generator.tokens(tokens, recorded.length || 1)) said.push(token);
  if (recorded.length && said.join() !== recorded.join()) throw new Error(`the model answers ${said}; expected ${recorded}`);
  show("good", `${recorded.length} generated tokens match the recorded ones`);

  const form = document.querySelector("#form");
  const { prompt, most, go, stop } = form.elements;
  const example = prompts[0];
  for (const name of fields(generation)) {
    const label = document.createElement("label");
    label.appendChild(document.createElement("span")).textContent = name.replaceAll("_", " ");
    label.appendChild(Object.assign(document.createElement("input"), { name, value: example.features[name] ?? "" }));
    document.querySelector("#inputs").append(label);
  }
  prompt.value = example.text;
  Object.assign(most, { value: generation.most, max: generation.most });
  const text = document.querySelector("#text");
  const spent = document.querySelector("#spent");
  form.onsubmit = async (event) => {
    event.preventDefault();
    const leaving = new AbortController();
    const { signal } = leaving;
    stop.onclick = () => leaving.abort();
    [go.disabled, stop.disabled] = [true, false];
    text.textContent = "";
    delete text.dataset.done;
    const features = Object.fromEntries(fields(generation).map((name) => [name, form.elements[name].value]));
    const began = performance.now();
    let first = 0;
    let count = 0;
    try {
      for await (const piece of generator.text(prompt.value, { features, most: Number(most.value), signal })) {
        first ||= performance.now() - began;
        count += 1;
        text.textContent += piece;
        const seconds = (performance.now() - began - first) / 1000;
        spent.textContent = `${first.toFixed(0)} ms to the first token, ${(count / Math.max(seconds, 1e-3)).toFixed(1)} tokens/s`;
        // Let the browser draw the text and handle clicks.
        await new Promise((resolve) => setTimeout(resolve));
      }
    } catch (error) {
      spent.textContent = error.message;
    }
    [go.disabled, stop.disabled] = [false, true];
    text.dataset.done = "yes";
  };
  form.hidden = false;
});
