// Computes the inputs of a numeric core: the steps of `head.json`, bit for bit. docs/heads.md describes the format.

const VERSION = 1;
const LARGEST = 2 ** 24;
const MOST = 2 ** 20;
const LOW = -(2n ** 63n);
const FEAST = {
  Bool: "bool", Int32: "int32", Int64: "int64", UnixTimestamp: "int64", Float32: "float", Float64: "double", String: "string",
};
const ARRAYS = { float: Float32Array, double: Float64Array, int32: Int32Array, int64: BigInt64Array, bool: Uint8Array, string: Array };

/** The reason a head cannot be read, or a row cannot be computed. */
export class HeadError extends Error {}

const check = (holds, message) => {
  if (!holds) throw new HeadError(message);
};
const same = (value) => value;
const int64 = (value) => BigInt.asIntN(64, value);

/** The nearest 32-bit number, rounded once: the bits that a double has no room for decide in its last one. */
const nearest = (whole) => {
  const size = whole < 0n ? -whole : whole;
  if (size < 2n ** 53n) return Math.fround(Number(whole));
  const short = Math.fround(Number((size >> 11n) | (size & 0x7ffn ? 1n : 0n))) * 2048;
  return whole < 0n ? -short : short;
};

/** Half to even. */
const rounded = (value) => {
  if (!(Math.abs(value) < 2 ** 52)) return value;
  const [size, low] = [Math.abs(value), Math.floor(Math.abs(value))];
  const up = size - low > 0.5 || (size - low === 0.5 && low % 2 === 1);
  return value < 0 || Object.is(value, -0) ? -(low + up) : low + up;
};

const SAME = { Equal: (a, b) => a === b };
const ORDER = {
  ...SAME, Less: (a, b) => a < b, LessOrEqual: (a, b) => a <= b, Greater: (a, b) => a > b, GreaterOrEqual: (a, b) => a >= b,
  Max: (a, b) => (a > b || a !== a ? a : b), Min: (a, b) => (a < b || a !== a ? a : b),
};
const reals = (round) => ({
  ...ORDER,
  Add: (a, b) => round(a + b), Sub: (a, b) => round(a - b), Mul: (a, b) => round(a * b), Div: (a, b) => round(a / b),
  Mod: (a, b) => a % b, Abs: (a) => Math.abs(a), Neg: (a) => -a, Floor: (a) => Math.floor(a), Ceil: (a) => Math.ceil(a),
  Round: rounded, Sqrt: (a) => round(Math.sqrt(a)), Sign: (a) => (a !== a ? a : (a > 0) - (a < 0)),
  IsNaN: (a) => a !== a, IsInf: (a) => Math.abs(a) === Infinity,
});
const divisor = (b) => {
  if (!b) throw new HeadError("a step divides by zero");
  return b;
};
const BITS = { BitwiseAnd: (a, b) => a & b, BitwiseOr: (a, b) => a | b, BitwiseXor: (a, b) => a ^ b, BitwiseNot: (a) => ~a };
/** By element type. */
const OPERATORS = {
  float: reals(Math.fround),
  double: reals(same),
  int32: {
    ...ORDER, ...BITS,
    Add: (a, b) => (a + b) | 0, Sub: (a, b) => (a - b) | 0, Mul: Math.imul, Div: (a, b) => Math.trunc(a / divisor(b)) | 0,
    Mod: (a, b) => (((a % divisor(b)) + b) % b) | 0, Abs: (a) => Math.abs(a) | 0, Neg: (a) => -a | 0,
  },
  int64: {
    ...ORDER, ...BITS,
    Add: (a, b) => int64(a + b), Sub: (a, b) => int64(a - b), Mul: (a, b) => int64(a * b), Div: (a, b) => int64(a / divisor(b)),
    Mod: (a, b) => ((a % divisor(b)) + b) % b, Abs: (a) => int64(a < 0n ? -a : a), Neg: (a) => int64(-a),
  },
  bool: { ...SAME, And: (a, b) => a && b, Or: (a, b) => a || b, Not: (a) => !a },
  string: { ...SAME, StringConcat: (a, b) => a + b },
};
const truncated = {
  int32: (a) => (a > -(2 ** 31) - 1 && a < 2 ** 31 ? Math.trunc(a) | 0 : -(2 ** 31)),
  int64: (a) => (a >= -(2 ** 63) && a < 2 ** 63 ? BigInt(Math.trunc(a)) : LOW),
};
const CASTS = {
  float: { double: same, ...truncated },
  double: { float: Math.fround, ...truncated },
  int32: { float: Math.fround, double: same, int64: BigInt, string: String },
  int64: { float: nearest, double: Number, int32: (a) => Number(BigInt.asIntN(32, a)), string: String },
  bool: { float: Number, double: Number, int32: Number, int64: BigInt },
};
const PREDICATES = ["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "IsNaN", "IsInf", "RegexFullMatch"];

const view = new DataView(new ArrayBuffer(8));
/** What constants are written as; throws where it is no value of the type. */
const VALUES = {
  float: (text) => {
    check(/^[0-9a-f]{8}$/.test(text), `${text} is no float`);
    view.setUint32(0, parseInt(text, 16));
    return view.getFloat32(0);
  },
  double: (text) => {
    check(/^[0-9a-f]{16}$/.test(text), `${text} is no double`);
    view.setBigUint64(0, BigInt(`0x${text}`));
    return view.getFloat64(0);
  },
  int32: (text) => {
    check(String(Number(text) | 0) === text, `${text} is no int32`);
    return Number(text);
  },
  int64: (text) => {
    check(/^(0|-?[1-9]\d{0,18})$/.test(text) && BigInt(text) === int64(BigInt(text)), `${text} is no int64`);
    return BigInt(text);
  },
  bool: (text) => {
    check(text === "0" || text === "1", `${text} is no bool`);
    return text === "1";
  },
  string: same,
};
const textOf = (text) => {
  check(typeof text === "string", `${text} is no text`);
  return text;
};
const valuesOf = (texts, element) => {
  check(Array.isArray(texts) && Object.hasOwn(VALUES, element), `no values of ${element}`);
  return texts.map((text) => VALUES[element](textOf(text)));
};

/** Checks that a text consists of parts with any text between them, each placed as far left as possible. */
function matcher(parts) {
  check(Array.isArray(parts) && parts.length, "a pattern has no parts");
  // Any character is null.
  const letters = parts.map((pieces) => {
    check(valuesOf(pieces, "string").length, "a part of a pattern has no pieces");
    return pieces.flatMap((piece) => [null, ...piece]).slice(1);
  });
  const [begin, end] = [letters[0], letters.length > 1 ? letters.at(-1) : []];
  const isAt = (text, place, part) => part.every((letter, n) => letter === null || letter === text[place + n]);
  return (value) => {
    const text = [...value];
    let place = begin.length;
    const last = text.length - end.length;
    if (place > last || !isAt(text, 0, begin) || !isAt(text, last, end)) return false;
    for (const part of letters.slice(1, -1)) {
      while (place + part.length <= last && !isAt(text, place, part)) place++;
      place += part.length;
    }
    return letters.length > 1 ? place <= last : place === last;
  };
}

/** The function of an operator, and the types of its operands and of its result. */
function operation(name, element, attribute) {
  const output = PREDICATES.includes(name) ? "bool" : element;
  const special = {
    Where: () => [element !== "bool" && ((condition, yes, no) => (condition ? yes : no)), ["bool", element, element], element],
    Cast: () => [Object.hasOwn(CASTS, element) && Object.hasOwn(CASTS[element], attribute) && CASTS[element][attribute], [element], attribute],
    Gather: () => {
      const table = valuesOf(attribute, element);
      const item = (place) => {
        const found = table[place < 0n ? Number(place) + table.length : Number(place)];
        check(found !== undefined, "a step reads beyond a table");
        return found;
      };
      return [item, ["int64"], element];
    },
    LabelEncoder: () => {
      check((element === "string" || element === "int64") && Array.isArray(attribute) && attribute.length === 3, "no vocabulary");
      const [keys, values, [other]] = [valuesOf(attribute[0], element), valuesOf(attribute[1], "int64"), valuesOf([attribute[2]], "int64")];
      check(keys.length === values.length, "a vocabulary without a value for each key");
      const places = new Map(keys.map((key, n) => [key, values[n]]));
      return [(key) => places.get(key) ?? other, [element], "int64"];
    },
    StringNormalizer: () => {
      check(element === "string" && (attribute === "LOWER" || attribute === "UPPER"), `no change of case ${attribute}`);
      const change = attribute === "LOWER" ? (letters) => letters.toLowerCase() : (letters) => letters.toUpperCase();
      return [(text) => text.replace(/[A-Za-z]+/g, change), [element], element];
    },
    RegexFullMatch: () => {
      check(element === "string", `no pattern of ${element}`);
      return [attribute === "ascii" ? (text) => /^[\x00-\x7f]*$/.test(text) : matcher(attribute), [element], output];
    },
  };
  const known = Object.hasOwn(OPERATORS, element) ? OPERATORS[element] : null;
  check(known && (Object.hasOwn(special, name) || (Object.hasOwn(known, name) && attribute === undefined)), `no operator ${name} of ${element}`);
  if (!Object.hasOwn(special, name)) return [known[name], Array(UNARY.includes(name) ? 1 : 2).fill(element), output];
  const found = special[name]();
  check(found[0], `no ${name} of ${element} with ${attribute}`);
  return found;
}
const UNARY = ["Abs", "Neg", "Floor", "Ceil", "Round", "Sqrt", "Sign", "IsNaN", "IsInf", "BitwiseNot", "Not"];

const real = (value) => {
  check(["number", "bigint", "boolean"].includes(typeof value), "no number");
  return Number(value);
};
/** A whole number of so many bits: a number that is exact, a BigInt, or digits. */
const whole = (value, bits) => {
  check(typeof value === "bigint" || Number.isSafeInteger(value) || /^-?\d+$/.test(textOf(value)), "no whole number");
  const number = BigInt(value);
  check(number === BigInt.asIntN(bits, number), "too large");
  return number;
};
/** A raw value in the type of its slot. */
const TYPED = {
  float: (value) => Math.fround(real(value)),
  double: real,
  int32: (value) => Number(whole(value, 32)),
  int64: (value) => whole(value, 64),
  bool: (value) => Boolean(real(value)),
  string: textOf,
};

/** The function that fills the slot of a raw value, and the type of the slot. */
function input([name, dtype, role]) {
  const element = Object.hasOwn(FEAST, textOf(dtype)) ? FEAST[dtype] : null;
  const isText = dtype === "String";
  check(typeof name === "string" && element && ["number", "text", "value", "valid"].includes(role), `input ${name} is a ${role} of ${dtype}`);
  check(!(role === "number" && isText) && !(role === "text" && !isText), `input ${name} is a ${role} of ${dtype}`);
  const is = (row) => row[name] !== null && row[name] !== undefined;
  const typed = (value) => {
    try {
      return TYPED[element](value);
    } catch {
      const large = element === "int64" && Number.isInteger(value) ? " as a BigInt" : "";
      throw new HeadError(`input ${name} is ${value}; expected a ${dtype}${large}`);
    }
  };
  const number = CASTS[element]?.float ?? same;
  const empty = { bool: false, int64: 0n, string: "" }[element] ?? 0;
  if (role === "valid") return [is, "bool"];
  if (role === "number") return [(row) => (is(row) ? number(typed(row[name])) : NaN), "float"];
  return [(row) => (is(row) ? typed(row[name]) : empty), element];
}

/** The head in `head.json`. */
export class Head {
  /** @param bytes of the file. Throws a HeadError if it is none, or of another version. */
  constructor(bytes) {
    check(bytes.byteLength <= LARGEST, `head.json has ${bytes.byteLength} bytes; expected at most ${LARGEST}`);
    try {
      this.#read(JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes)));
    } catch (error) {
      throw error instanceof HeadError ? error : new HeadError(`head.json cannot be read: ${error.message}`);
    }
  }

  #read(form) {
    check(form.version === VERSION, `head.json has version ${form.version}; expected ${VERSION}`);
    const types = [];
    const places = (slots, elements) => slots.map((slot, n) => {
      const element = elements[n % elements.length];
      check(Number.isInteger(slot) && slot >= 0 && slot < types.length, `slot ${slot} of ${types.length} is read`);
      check(types[slot] === element, `slot ${slot} holds ${types[slot]}; expected ${element}`);
      return slot;
    });
    this.inputs = form.inputs.map((parts) => {
      const [fill, element] = input(parts);
      types.push(element);
      return fill;
    });
    this.values = this.inputs.map(() => null);
    for (const [element, texts] of form.constants) {
      for (const value of valuesOf(texts, element)) {
        this.values.push(value);
        types.push(element);
      }
    }
    this.steps = [];
    for (const [name, element, slots, attribute] of form.steps) {
      const [apply, operands, output] = operation(name, element, attribute);
      check(slots.length % operands.length === 0, `${name} takes ${operands.length} operands, and gets ${slots.length}`);
      check(types.length + slots.length / operands.length <= MOST, `more than ${MOST} slots`);
      for (let n = 0; n < slots.length; n += operands.length) {
        const [a, b = a, c = a] = places(slots.slice(n, n + operands.length), operands);
        this.steps.push({ apply, a, b, c });
        types.push(output);
      }
    }
    this.outputs = form.outputs.map(([name, element, slots]) => {
      check(Object.hasOwn(ARRAYS, element), `no tensor of ${element}`);
      return { name: textOf(name), array: ARRAYS[element], slots: places(slots, [element]) };
    });
    check(new Set(this.outputs.map(({ name }) => name)).size === this.outputs.length, "two outputs have the same name");
    this.refused = form.refused === null ? null : places([form.refused], ["bool"])[0];
  }

  /**
   * Computes the inputs of the core from a row of raw values, by the names of the model's inputs; null for no value.
   *
   * Whole numbers may be a BigInt; a UnixTimestamp is in microseconds since 1970 UTC. `tensors` has a typed array of one
   * row by name. Where `refused` is true, a request feature is not defined for these values, and the answer is NaN.
   */
  row(values) {
    const slots = [...this.values];
    this.inputs.forEach((fill, slot) => (slots[slot] = fill(values)));
    for (const { apply, a, b, c } of this.steps) slots.push(apply(slots[a], slots[b], slots[c]));
    const tensors = Object.fromEntries(this.outputs.map((of) => [of.name, of.array.from(of.slots, (slot) => slots[slot])]));
    return { tensors, refused: this.refused !== null && slots[this.refused] };
  }
}
