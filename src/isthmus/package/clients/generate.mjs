// Text from a causal language model, token by token, in onnxruntime-web or onnxruntime-node.

import { Tokenizer } from "./tokenizer.mjs";

const PART = 256;
const FIELD = /\{([A-Za-z_][A-Za-z0-9_]*)\}/g;

/** The features that the template of a manifest's `generation` names. */
export function fields({ template = "{prompt}" }) {
  return [...new Set([...template.matchAll(FIELD)].map(([, name]) => name))].filter((name) => name !== "prompt");
}

/** A prompt as texts and control tokens: what a user or the online store says is text, whatever it looks like. */
export function parts({ template = "{prompt}", control = [] }, prompt, features = {}) {
  const values = { ...features, prompt };
  const tokens = new Map(control.map(({ text, token }) => [text, token]));
  const words = [...tokens.keys()].sort((one, other) => other.length - one.length);
  const pattern = words.map((word) => word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")).join("|");
  const pieces = pattern ? template.split(new RegExp(`(${pattern})`, "u")) : [template];
  const filled = (piece) => piece.replace(FIELD, (_, name) => {
    if (values[name] === undefined) throw new Error(`feature ${name} of the prompt is missing`);
    return values[name];
  });
  return pieces.map((piece) => tokens.get(piece) ?? filled(piece)).filter((part) => part !== "");
}

export class Generator {
  /**
   * @param ort onnxruntime-web.
   * @param opened the package: `manifest` and `session`.
   * @param file what `tokenizer.json` holds.
   */
  constructor(ort, { manifest, session }, file) {
    Object.assign(this, { ort, session, generation: manifest.generation });
    this.tokenizer = new Tokenizer(file, manifest.generation);
    this.shape = manifest.tensors.find(({ name }) => name === "past").shape.slice(2);
  }

  /** The tokens of a prompt. */
  encode(prompt, features) {
    return this.tokenizer.encode(parts(this.generation, prompt, features));
  }

  /** The likeliest tokens behind a prompt, to the end of the text, of the room for it, or of `signal`. */
  async *tokens(prompt, most = Infinity, signal = null) {
    const { context, most: longest, end } = this.generation;
    if (!prompt.length || prompt.length >= context) {
      throw new Error(`the prompt has ${prompt.length} tokens; expected 1 to ${context - 1}`);
    }
    const room = Math.min(most, longest, context - prompt.length);
    const width = this.shape.reduce((one, other) => one * other);
    const cache = new Float32Array((prompt.length + room) * width);
    let length = 0;
    let fed = prompt;
    for (let count = 0; count < room; count += 1) {
      let logits;
      for (let begin = 0; begin < fed.length; begin += PART) {
        if (signal?.aborted) return;
        const part = fed.slice(begin, begin + PART);
        const tokens = new this.ort.Tensor("int64", BigInt64Array.from(part, BigInt), [1, part.length]);
        const past = new this.ort.Tensor("float32", cache.subarray(0, length * width), [1, length, ...this.shape]);
        const answers = await this.session.run({ tokens, past });
        cache.set(answers.new.data, length * width);
        length += part.length;
        logits = answers.logits.data;
      }
      let token = 0;
      for (let place = 0; place < logits.length; place += 1) {
        if (!Number.isFinite(logits[place])) throw new Error(`the model has no logits behind ${length} tokens: NaN or infinite`);
        if (logits[place] > logits[token]) token = place;
      }
      yield token;
      if (end.includes(token)) return;
      fed = [token];
    }
  }

  /** The text behind a prompt, as it comes: a letter of several tokens appears when it is complete. */
  async *text(prompt, { features = {}, most = Infinity, signal = null } = {}) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    for await (const token of this.tokens(this.encode(prompt, features), most, signal)) {
      yield decoder.decode(this.tokenizer.bytes(token), { stream: true });
    }
    yield decoder.decode();
  }
}
