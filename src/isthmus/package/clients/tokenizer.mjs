// Byte-level BPE, from the file that the library tokenizers writes. `isthmus` refuses unsupported files at export.

const GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const ALPHABET = (() => {
  const within = (byte) => (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
  let hidden = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(within(byte) ? byte : hidden++));
})();
const BYTES = new Map(ALPHABET.map((letter, byte) => [letter, byte]));
const quoted = (text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");

/** A regular expression of Oniguruma in JavaScript's words: white space is Unicode's, and (?i:…) is spelled out. */
function translated(pattern) {
  const either = (letter) => `[${letter.toLowerCase()}${letter.toUpperCase()}${/s/i.test(letter) ? "\u017f" : ""}]`;
  return pattern
    .replace(/\(\?i:([^()]*)\)/g, (_, inner) => `(?:${inner.replace(/[a-z]/gi, either)})`)
    .replace(/\\s/g, "\\p{White_Space}").replace(/\\S/g, "\\P{White_Space}").replace(/\\d/g, "\\p{Nd}");
}

/** A text cut into matches and what is between them; `match` and `rest` say which of the two stay. */
function cut(text, pattern, match = true, rest = true) {
  const pieces = [];
  let end = 0;
  for (const found of text.matchAll(pattern)) {
    if (rest && found.index > end) pieces.push(text.slice(end, found.index));
    if (match && found[0]) pieces.push(found[0]);
    end = found.index + found[0].length;
  }
  if (rest && end < text.length) pieces.push(text.slice(end));
  return pieces;
}

/** What a pre-tokenizer makes of a text: a function from a text to its pieces. */
function splitter(declared) {
  if (!declared) return (text) => [text];
  switch (declared.type) {
    case "Sequence": {
      const steps = declared.pretokenizers.map(splitter);
      return (text) => steps.reduce((pieces, step) => pieces.flatMap(step), [text]);
    }
    case "Split": {
      const { Regex: regex, String: string } = declared.pattern;
      const pattern = new RegExp(regex === undefined ? quoted(string) : translated(regex), "gu");
      if (declared.behavior === "Isolated") return (text) => cut(text, pattern);
      if (declared.behavior === "Removed") return (text) => cut(text, pattern, declared.invert, !declared.invert);
      break;
    }
    case "Digits": {
      const pattern = declared.individual_digits ? /\p{N}/gu : /\p{N}+/gu;
      return (text) => cut(text, pattern);
    }
    case "ByteLevel": {
      if (declared.add_prefix_space) break;
      if (declared.use_regex === false) return (text) => [text];
      const pattern = new RegExp(translated(GPT2), "gu");
      return (text) => cut(text, pattern);
    }
  }
  throw new Error(`tokenizer.json: a pre-tokenizer ${JSON.stringify(declared)} is unknown here`);
}

export class Tokenizer {
  /**
   * @param file what `tokenizer.json` holds.
   * @param generation that of the manifest.
   */
  constructor(file, generation) {
    const { model } = file;
    this.begin = generation.begin ?? [];
    this.vocabulary = new Map(Object.entries(model.vocab));
    this.whole = model.ignore_merges ?? false;
    this.ranks = new Map(model.merges.map((pair, rank) => [typeof pair === "string" ? pair : pair.join(" "), rank]));
    const normalizers = file.normalizer?.type === "Sequence" ? file.normalizer.normalizers : file.normalizer ? [file.normalizer] : [];
    this.normalize = (text) => (normalizers.length ? text.normalize("NFC") : text);
    this.pieces = splitter(file.pre_tokenizer);
    this.letters = new Map([...this.vocabulary].map(([letters, token]) => [token, letters]));
    for (const { id, content } of file.added_tokens) this.letters.set(id, content);
    this.control = new Set(file.added_tokens.filter((token) => token.special).map((token) => token.id));
    // Special tokens in a text are treated as plain text.
    const words = file.added_tokens.filter((token) => !token.special);
    this.added = new Map(words.map(({ id, content, normalized }) => [normalized ? this.normalize(content) : content, id]));
    const pattern = (normalized) => {
      const some = words.filter((word) => word.normalized === normalized).map((word) => (normalized ? this.normalize(word.content) : word.content));
      return some.length ? new RegExp(some.sort((one, other) => other.length - one.length).map(quoted).join("|"), "gu") : /(?!)/gu;
    };
    this.raw = pattern(false);
    this.normal = pattern(true);
    this.words = new Map();
  }

  /** The tokens of texts and control tokens, in order, behind those that begin every prompt. */
  encode(parts) {
    return [...this.begin, ...parts.flatMap((part) => (typeof part === "number" ? [part] : this.plain(part)))];
  }

  /** The tokens of a text. Throws where it has letters that no token has. */
  plain(text) {
    if (!text.isWellFormed()) throw new Error("the prompt is no text: it has half of a pair of surrogates");
    const known = (piece) => (this.added.has(piece) ? [this.added.get(piece)] : null);
    let said = "";
    const tokens = cut(text, this.raw).flatMap((outer) => {
      if (known(outer)) {
        said += outer;
        return known(outer);
      }
      const normal = this.normalize(outer);
      said += normal;
      return cut(normal, this.normal).flatMap((piece) => known(piece) ?? this.pieces(piece).flatMap((word) => this.merged(word)));
    });
    const bytes = tokens.flatMap((token) => [...this.bytes(token)]);
    if (new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes)) !== said) throw new Error("the prompt has letters that no token has");
    return tokens;
  }

  /** The tokens of a word: of all pairs, the one that was learned first is merged, again and again. */
  merged(word) {
    const cached = this.words.get(word);
    if (cached) return cached;
    const letters = [...new TextEncoder().encode(word)].map((byte) => ALPHABET[byte]);
    const all = this.whole ? this.vocabulary.get(letters.join("")) : undefined;
    const parts = letters.filter((letter) => this.vocabulary.has(letter));
    while (all === undefined) {
      let best = Infinity;
      let place = -1;
      for (let at = 0; at + 1 < parts.length; at += 1) {
        const rank = this.ranks.get(`${parts[at]} ${parts[at + 1]}`) ?? Infinity;
        if (rank < best) [best, place] = [rank, at];
      }
      if (place < 0) break;
      parts.splice(place, 2, parts[place] + parts[place + 1]);
    }
    const tokens = all === undefined ? parts.map((part) => this.vocabulary.get(part)) : [all];
    if (this.words.size < 50_000) this.words.set(word, tokens);
    return tokens;
  }

  /** What a token adds to a text, as bytes; nothing if it is a control token. */
  bytes(token) {
    const letters = this.control.has(token) ? "" : this.letters.get(token) ?? "";
    const bytes = [...letters].map((letter) => BYTES.get(letter));
    return bytes.includes(undefined) ? new TextEncoder().encode(letters) : Uint8Array.from(bytes);
  }
}
