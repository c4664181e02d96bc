// A form for any model of rows, with a field for each input in the manifest that is not stored on the device.

import { begin, show } from "./begin.mjs";
import { Predictor } from "./predict.mjs";
import { Snapshots, span } from "./snapshot.mjs";

const BY = { default: ", the declared default", instead: ", by the model without stored features" };
const whole = /^(Int|UnixTimestamp)/;
const input = (name) => document.querySelector(`[name="${CSS.escape(name)}"]`);

begin(async ({ ort, opened, instead, note }) => {
  const { manifest, golden } = opened;
  const every = [...manifest.inputs, ...(instead?.manifest.inputs ?? [])];
  const inputs = [...new Map(every.map((one) => [one.name, one])).values()];
  const kept = note.snapshot ? await keep(manifest.device, note.snapshot) : null;
  const asked = kept ? kept.asked(inputs) : inputs;
  const given = manifest.inputs.filter((one) => one.tensor.startsWith("given_"));
  // Request fields first, then the features of each view.
  const view = ({ name }) => (name.includes("__") ? name.slice(0, name.indexOf("__")) : "");
  for (const of of [...new Set(asked.map(view))].sort((one, other) => Number(one !== "") - Number(other !== ""))) {
    const group = document.createElement("details");
    group.open = of === "" || asked.length < 12;
    group.appendChild(document.createElement("summary")).textContent = of.replaceAll("_", " ") || "request";
    for (const one of asked.filter((each) => view(each) === of)) group.append(label(one));
    document.querySelector("#inputs").append(group);
  }
  const rows = golden.cases[0].rows;
  const example = document.querySelector("#example");
  rows.forEach((_, place) => example.append(new Option(`test row ${place + 1}`, place)));
  example.onchange = () => {
    rows[example.value].forEach((value, place) => {
      const field = input(golden.inputs[place]);
      if (field) field.value = value === null ? "" : String(value);
    });
  };
  example.onchange();

  const owner = asked.find(({ name }) => name === manifest.device?.owner);
  if (kept && owner) {
    // Fetch the features of an owner early. Errors are shown at the prediction.
    const fetched = async () => {
      try {
        await kept.of({ [owner.name]: read(owner) });
      } catch {}
    };
    input(owner.name).onchange = fetched;
    if (input(owner.name).value) await fetched();
  }
  const form = document.querySelector("#form");
  form.onsubmit = async (event) => {
    event.preventDefault();
    const answer = document.querySelector("#answer");
    try {
      const row = Object.fromEntries(asked.map((one) => [one.name, read(one)]));
      const predictor = new Predictor(ort, opened, await kept?.of(row), instead);
      const began = performance.now();
      const { value, probabilities, by, why } = await predictor.predict(row);
      const spent = performance.now() - began;
      if (by === "model") kept?.show(row);
      Object.assign(answer.dataset, { value, by });
      answer.innerHTML = "<strong></strong><span></span>";
      const none = value === null || Number.isNaN(value);
      answer.firstChild.textContent = none ? "no answer" : typeof value === "number" ? value.toFixed(4) : [value].flat().join(", ") || "no class";
      const said = probabilities
        ? Object.entries(probabilities).map(([name, share]) => `${name} ${share.toFixed(4)}`).join(", ")
        : `${manifest.outputs[0].name} of ${(note.label ?? manifest.name).replaceAll("_", " ")}`;
      const unknown = by === "model" && kept ? kept.unknown(row) : [];
      answer.lastChild.textContent = none
        ? "A request feature is not defined for these values."
        : `${said}, in ${spent.toFixed(2)} ms in this browser${BY[by] ?? ""}${why ? `: ${why}` : ""}`;
      if (unknown.length) {
        const warning = answer.appendChild(document.createElement("p"));
        warning.className = "bad";
        warning.textContent = `This device has no row for ${unknown.join(", ")}: its features are null.`;
      }
    } catch (error) {
      answer.textContent = error.message;
      delete answer.dataset.by;
    }
  };
  form.hidden = false;
  show("good", `${inputs.length} raw inputs${kept ? `, ${inputs.length - kept.typed} of them kept on this device` : ""}; scaling, vocabularies and ${given.length ? "request features" : "imputation"} are in the graph`);
});

/** Return a field for an input, labeled with its name without the view. */
function label({ name, dtype }) {
  const made = document.createElement("label");
  const span = made.appendChild(document.createElement("span"));
  span.textContent = name.replace(/^.*?__/, "").replaceAll("_", " ");
  span.appendChild(document.createElement("small")).textContent = dtype;
  const field = made.appendChild(document.createElement("input"));
  field.name = name;
  field.inputMode = dtype === "String" ? "text" : "decimal";
  field.placeholder = "null";
  return made;
}

/** Return the value of a field. An empty field is null. */
function read({ name, dtype, size }) {
  const text = input(name).value;
  if (text === "") return null;
  if (size) {
    const numbers = text.split(",").map((part) => (part.trim() ? Number(part) : NaN));
    if (numbers.length !== size || numbers.some(Number.isNaN)) throw new Error(`${name}: ${text} is not ${size} numbers between commas`);
    return numbers;
  }
  if (dtype === "String") return text;
  if (dtype === "Bytes") return bytes(name, text);
  if (dtype === "Bool") {
    if (!/^\s*(1|true|0|false)\s*$/i.test(text)) throw new Error(`${name}: ${text} is not true or false`);
    return /1|true/i.test(text) ? 1 : 0;
  }
  if (whole.test(dtype)) {
    if (!/^-?\d+$/.test(text.trim())) throw new Error(`${name}: ${text} is not a whole number`);
    const number = BigInt(text.trim());
    // A tensor would wrap it around.
    if (number !== BigInt.asIntN(dtype === "Int32" ? 32 : 64, number)) throw new Error(`${name}: ${text} is out of range for ${dtype}`);
    return number;
  }
  const number = Number(text);
  if (text.trim() === "" || (Number.isNaN(number) && text !== "NaN")) throw new Error(`${name}: ${text} is not a number`);
  return number;
}

/** Decode the bytes of a key from Base64, as in paths and in JSON. */
function bytes(name, text) {
  try {
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  } catch {
    throw new Error(`${name}: ${text} is not Base64`);
  }
}

/** Fetch the stored features now and every minute, and show their age. */
async function keep(device, { url, key, files, now }) {
  const clock = now === null ? undefined : () => BigInt(now);
  const place = new URL(url, document.baseURI).href;
  const open = (owner) => Snapshots.open({ device, url: place, files, key, owner, ...(clock && { now: clock }) });
  let snapshots = device.owner ? null : await open(null);
  let [whose, ready] = [null, Promise.resolve(snapshots)];
  const line = document.createElement("li");
  document.querySelector("#checks").append(line);
  const refresh = async () => {
    if (!snapshots) {
      line.textContent = `no stored features yet: enter a ${device.owner} to load its features`;
      return;
    }
    await snapshots.update().catch(() => {});
    const { state, problem } = snapshots;
    const rows = state ? [...state.rows.values()].reduce((sum, one) => sum + one.size, 0) : 0;
    // Being offline is fine: the device uses the features it has.
    line.className = state && (!problem || problem.kind === "offline") ? "good" : "bad";
    line.textContent = state
      ? `${rows} rows of stored features (${(state.bytes.length / 1000).toFixed(1)} kB), ${span(snapshots.age)} old (allowed: ${span(device.age)})`
      : "no stored features yet";
    if (problem) line.textContent += ` (${problem.message})`;
    line.dataset.digest = state?.digest ?? "";
    line.dataset.owner = snapshots.owner?.text ?? "";
  };
  await refresh();
  setInterval(refresh, 60_000);
  addEventListener("online", refresh);
  const stored = new Set(device.views.flatMap((view) => view.fields.map(([name]) => `${view.name}__${name}`)));
  const keys = new Map(device.views.flatMap((view) => view.keys));
  return {
    typed: 0,
    /** The inputs to enter: all join keys, and inputs that are not stored. */
    asked(inputs) {
      const rest = inputs.filter(({ name }) => !stored.has(name));
      this.typed = rest.length;
      const named = new Set(rest.map(({ name }) => name));
      return [...[...keys].filter(([name]) => !named.has(name)).map(([name, dtype]) => ({ name, dtype, tensor: "" })), ...rest];
    },
    /** Return the snapshots for a row. If each owner has a file, fetch the file of a new owner first. */
    of(row) {
      const asked = `${row[device.owner]}`;
      if (device.owner && asked !== whose) {
        const fetched = async () => {
          const made = await open(row[device.owner]);
          snapshots = made;
          await refresh();
          // If nothing was loaded, try again at the next prediction.
          if (!made.state && whose === asked) whose = null;
          return made;
        };
        whose = asked;
        ready = fetched();
        ready.catch(() => (whose = null));
      }
      return ready;
    },
    /** Return the keys without a stored row, such as mistyped ones. */
    unknown(row) {
      const without = device.views.filter(({ name }) => snapshots.row(name, row).status === "not_found");
      return [...new Set(without.map(({ keys }) => keys.map(([name]) => `${name} ${row[name]}`).join(" and ")))];
    },
    /** Show the stored rows behind an answer, with their age. */
    show(keys) {
      for (const { name } of device.views) {
        const { status, event, values } = snapshots.row(name, keys);
        let group = document.querySelector(`#stored-${CSS.escape(name)}`);
        if (!group) {
          group = document.createElement("details");
          group.id = `stored-${name}`;
          document.querySelector("#inputs").append(group);
        }
        const title = document.createElement("summary");
        title.textContent = name.replaceAll("_", " ");
        const age = event === null ? "" : `, ${span(snapshots.present - event)} old`;
        title.appendChild(document.createElement("small")).textContent = ` ${status.replace("_", " ")}${age}`;
        group.replaceChildren(title, ...Object.entries(values).map(([feature, value]) => {
          const row = document.createElement("div");
          row.className = "stored";
          row.appendChild(document.createElement("span")).textContent = feature.replaceAll("_", " ");
          row.appendChild(document.createElement("b")).textContent = shown(value);
          return row;
        }));
      }
    },
  };
}

/** Format a stored value briefly. */
function shown(value) {
  if (value === null) return "null";
  return typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : String(value);
}
