// The tokenizer of BERT, from the file that the library tokenizers writes.

const PUNCTUATION = /[!-/:-@[-`{-~]|\p{P}/u;
const HAN = /[\u4E00-\u9FFF\u3400-\u4DBF\u{20000}-\u{2A6DF}\u{2A700}-\u{2B73F}\u{2B740}-\u{2B81F}\u{2B820}-\u{2CEAF}\uF900-\uFAFF\u{2F800}-\u{2FA1F}]/u;

export class WordPiece {
  /** @param file what `tokenizer.json` holds. */
  constructor(file) {
    const { model, normalizer, pre_tokenizer: splitter } = file;
    if (model.type !== "WordPiece" || normalizer?.type !== "BertNormalizer" || splitter?.type !== "BertPreTokenizer") {
      throw new Error("tokenizer.json: not a tokenizer of BERT");
    }
    this.model = model;
    this.normalizer = normalizer;
  }

  /** The tokens of a text between those that mark its beginning and its end, no more than so many in all. */
  encode(text, most) {
    const { vocab } = this.model;
    const ids = this.words(text).flatMap((word) => this.pieces(word));
    return [vocab["[CLS]"], ...ids.slice(0, most - 2), vocab["[SEP]"]];
  }

  words(text) {
    const { clean_text: clean, handle_chinese_chars: han, lowercase, strip_accents: strip } = this.normalizer;
    let letters = [...text];
    if (clean) {
      letters = letters
        .filter((letter) => letter !== "\u0000" && letter !== "\uFFFD" && (/[\t\n\r]/.test(letter) || !/\p{C}/u.test(letter)))
        .map((letter) => (/[\t\n\r]|\p{White_Space}/u.test(letter) ? " " : letter));
    }
    if (han) letters = letters.flatMap((letter) => (HAN.test(letter) ? [" ", letter, " "] : [letter]));
    if (strip ?? lowercase) letters = [...letters.join("").normalize("NFD")].filter((letter) => !/\p{Mn}/u.test(letter));
    // Each for itself: in a word, JavaScript knows a final sigma.
    if (lowercase) letters = letters.map((letter) => letter.toLowerCase());
    const words = [];
    let word = "";
    for (const letter of [...letters.join(""), " "]) {
      const space = /\p{White_Space}/u.test(letter);
      const alone = PUNCTUATION.test(letter);
      if ((space || alone) && word) {
        words.push(word);
        word = "";
      }
      if (alone) words.push(letter);
      else if (!space) word += letter;
    }
    return words;
  }

  /** The longest pieces that are known, from the left. */
  pieces(word) {
    const { vocab, unk_token: unknown, continuing_subword_prefix: prefix, max_input_chars_per_word: most } = this.model;
    const letters = [...word];
    if (letters.length > most) return [vocab[unknown]];
    const found = [];
    for (let begin = 0; begin < letters.length; ) {
      let end = letters.length;
      let id;
      for (; end > begin; end -= 1) {
        id = vocab[(begin ? prefix : "") + letters.slice(begin, end).join("")];
        if (id !== undefined) break;
      }
      if (id === undefined) return [vocab[unknown]];
      found.push(id);
      begin = end;
    }
    return found;
  }
}
