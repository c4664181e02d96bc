// Conversion of the runtime's tensors to JSON, for scripts in Node.

const TYPES = { float: "float32", double: "float64" };

/** Convert a tensor to the format of `golden.json`. */
export function kept({ type, dims, data }) {
  const element = Object.keys(TYPES).find((name) => TYPES[name] === type) ?? type;
  if (element === "string") return { element, shape: dims, texts: data };
  return { element, shape: dims, data: Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("base64") };
}

/** Convert all tensors of an object. */
export const all = (tensors) => Object.fromEntries(Object.entries(tensors).map(([name, of]) => [name, kept(of)]));
