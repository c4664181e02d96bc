// Embeds a question on the device, and shows the passages whose vectors lie nearest to it.

import { begin, show } from "./begin.mjs";
import { WordPiece } from "./wordpiece.mjs";

const SHOWN = 10;

begin(async ({ ort, opened }) => {
  const json = async (name) => JSON.parse(new TextDecoder().decode(await opened.file(name)));
  const tokenizer = new WordPiece(await json("tokenizer.json"));
  const { tokens: most, pairs } = await json("tokens.json");
  for (const { text, input_ids: expected } of pairs) {
    const found = tokenizer.encode(text, most);
    if (found.join() !== expected.join()) throw new Error(`tokens of ${JSON.stringify(text)}: ${found}; expected ${expected}`);
  }
  show("good", `${pairs.length} texts give the very tokens that they must`);
  const passages = await json("index.json");
  const vectors = new Int8Array(await opened.file("index.i8"));
  const width = vectors.length / passages.length;
  show("good", `${passages.length.toLocaleString("en")} passages, ${(vectors.length / 1e6).toFixed(1)} MB of vectors`);

  const embed = async (text) => {
    const ids = tokenizer.encode(text, most);
    const made = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, ids.length]);
    const { vector } = await opened.session.run({ input_ids: made(ids), attention_mask: made(ids.map(() => 1)) });
    return vector.data;
  };

  const form = document.querySelector("#form");
  const question = form.elements.question;
  let asked = 0;
  const search = async () => {
    const turn = (asked += 1);
    const began = performance.now();
    const vector = await embed(question.value);
    const embedded = performance.now();
    const scores = passages.map((_, row) => {
      let score = 0;
      for (let place = 0, at = row * width; place < width; place += 1) score += vector[place] * vectors[at + place];
      return [score / 127, row];
    });
    scores.sort(([one], [other]) => other - one);
    const ended = performance.now();
    // Somebody types faster than this: only what was asked last is shown.
    if (turn !== asked) return;
    document.querySelector("#spent").textContent =
      `${(embedded - began).toFixed(1)} ms for the question, ${(ended - embedded).toFixed(1)} ms for the search`;
    document.querySelector("#found").replaceChildren(...scores.slice(0, SHOWN).map(([score, row]) => {
      const line = document.createElement("li");
      line.append(Object.assign(document.createElement("b"), { textContent: passages[row].name }));
      line.append(Object.assign(document.createElement("small"), { textContent: `${score.toFixed(3)} · ${passages[row].text}` }));
      return line;
    }));
  };
  question.oninput = search;
  form.onsubmit = (event) => event.preventDefault();
  form.hidden = false;
});
