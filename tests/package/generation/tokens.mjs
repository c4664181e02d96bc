// `node tokens.mjs CLIENT CASES` compares the tokens of texts with those that another library gave.
import { readFileSync } from "node:fs";

const [client, cases] = process.argv.slice(2);
const { Tokenizer } = await import(client);
const { file, generation, texts, tokens, pieces } = JSON.parse(readFileSync(cases));
const tokenizer = new Tokenizer(JSON.parse(file), generation);
const wrong = texts.filter((text, place) => tokenizer.encode([text]).join() !== tokens[place].join());
const decoder = () => new TextDecoder("utf-8", { ignoreBOM: true });
const lost = texts.filter((text, place) => {
  const letters = decoder();
  return tokens[place].map((token) => letters.decode(tokenizer.bytes(token), { stream: true })).join("") + letters.decode() !== pieces[place];
});
const refused = [];
for (const text of ["half \ud800"]) {
  try {
    tokenizer.encode([text]);
  } catch (error) {
    refused.push(error.message);
  }
}
process.stdout.write(JSON.stringify({ wrong: wrong.slice(0, 3), lost: lost.slice(0, 3), refused }));
