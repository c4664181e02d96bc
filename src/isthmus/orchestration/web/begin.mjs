// What every page does first: opens the package beside it, and says what was checked.

import * as ort from "./ort/ort.wasm.min.mjs";
import { open } from "./model.mjs";

/** A line of the list of checks. */
export function show(kind, text) {
  const line = document.createElement("li");
  line.className = kind;
  line.textContent = text;
  document.querySelector("#checks").append(line);
}

/** Opens the package and hands it to a page; says what is wrong if it cannot. */
export async function begin(page) {
  ort.env.wasm.wasmPaths = new URL("ort/", document.baseURI).href;
  // More need headers that a plain server of files does not send.
  ort.env.wasm.numThreads = 1;
  const of = (folder) => async (name) => {
    const answer = await fetch(`${folder}/${name}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${name}: ${answer.status} ${answer.statusText}`);
    return answer.arrayBuffer();
  };
  const checks = document.querySelector("#checks");
  try {
    const note = await (await fetch("page.json")).json();
    const { contract, precision } = note;
    const began = performance.now();
    const opened = await open(ort, of("package"), { contract, precision });
    const instead = note.instead ? await open(ort, of("instead"), note.instead) : null;
    const { manifest, variant, golden, worst } = opened;
    checks.replaceChildren();
    checks.dataset.worst = worst;
    document.title = manifest.name;
    document.querySelector("#name").textContent = manifest.name.replaceAll("_", " ");
    show("good", `sums of ${variant.file} (${(variant.bytes / 1000).toFixed(0)} kB), opened in ${(performance.now() - began).toFixed(0)} ms`);
    show("good", `contract ${manifest.contract.slice(0, 12)}`);
    const cases = golden.cases.length === 1 ? "golden case" : "golden cases";
    show("good", `${golden.cases.length} ${cases}, farthest ${worst.toExponential(1)}`);
    await page({ ort, opened, instead, note });
    // Only where a page is of use without a connection: its features are on the device.
    if (note.snapshot && navigator.serviceWorker) await navigator.serviceWorker.register("worker.js");
    document.body.dataset.ready = "yes";
  } catch (error) {
    checks.replaceChildren();
    show("bad", error.message);
    document.body.dataset.ready = "no";
  }
}
