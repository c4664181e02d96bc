// Holds head.mjs to cases: `node cases.mjs FILE`, whose lines tests/package/featurizer/cases.py describes.
import { createReadStream } from "node:fs";
import { createInterface } from "node:readline";
import { Head, HeadError } from "../../../src/isthmus/package/clients/head.mjs";

const view = new DataView(new ArrayBuffer(8));
const hex = (digits) => Uint8Array.from(Buffer.from(digits, "hex"));
const READ = {
  Bool: (text) => text === "1", Int32: Number, Int64: BigInt, UnixTimestamp: BigInt,
  Float32: (text) => (text === "nan" ? NaN : new DataView(hex(text).buffer).getFloat32(0)),
  Float64: (text) => (text === "nan" ? NaN : new DataView(hex(text).buffer).getFloat64(0)),
  String: (text) => Buffer.from(text.slice(1), "hex").toString(),
};

function shown(value, array) {
  if (typeof value === "string") return "s" + Buffer.from(value).toString("hex");
  if (array instanceof Float32Array) {
    view.setFloat32(0, value);
    return Number.isNaN(value) ? "nan" : view.getUint32(0).toString(16).padStart(8, "0");
  }
  if (array instanceof Float64Array) {
    view.setFloat64(0, value);
    return Number.isNaN(value) ? "nan" : view.getBigUint64(0).toString(16).padStart(16, "0");
  }
  return String(value);
}

let [head, columns, passed, failed] = [null, [], 0, 0];
const check = (found, expected) => {
  if (found === expected) return passed++;
  if (failed++ < 10) console.log(`${found}\nand expected was\n${expected}`);
};
for await (const line of createInterface({ input: createReadStream(process.argv[2]) })) {
  const [kind, ...words] = line.split(" ");
  if (kind === "head") head = new Head(Buffer.from(words[0], "base64"));
  if (kind === "columns") columns = words.map((word) => word.split(":"));
  if (kind === "torn") {
    let answer = "taken";
    try {
      new Head(Buffer.from(words[0] ?? "", "base64"));
    } catch (error) {
      answer = error instanceof HeadError ? "refused" : `${error}`;
    }
    check(`${answer} ${answer === "refused" ? "" : line.slice(0, 200)}`, "refused ");
  }
  if (kind === "row") {
    const end = words.indexOf("=");
    const row = Object.fromEntries(columns.map(([name, dtype], n) => [name, words[n] === "-" ? null : READ[dtype](words[n])]));
    const { tensors, refused } = head.row(row);
    const found = Object.values(tensors).flatMap((array) => Array.from(array, (value) => shown(value, array)));
    check([...found, Number(refused)].join(" "), words.slice(end + 1).join(" "));
  }
}
console.log(`${passed} passed, ${failed} failed`);
process.exitCode = failed ? 1 : 0;
