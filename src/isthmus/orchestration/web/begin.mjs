// Start of every page: open the package next to the page and list the checks.

import * as ort from "./ort/ort.wasm.min.mjs";
import { open } from "./model.mjs";

/** Add a line to the list of checks. */
export function show(kind, text) {
  const line = document.createElement("li");
  line.className = kind;
  line.textContent = text;
  document.querySelector("#checks").append(line);
}

/** Open the package and pass it to `page`. Show the error if that fails. */
export async function begin(page) {
  ort.env.wasm.wasmPaths = new URL("ort/", document.baseURI).href;
  // More threads need headers that a static file server does not send.
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
    show("good", `checksums of ${variant.file} (${(variant.bytes / 1000).toFixed(0)} kB), opened in ${(performance.now() - began).toFixed(0)} ms`);
    show("good", `contract ${manifest.contract.slice(0, 12)}`);
    const cases = golden.cases.length === 1 ? "golden case" : "golden cases";
    show("good", `${golden.cases.length} ${cases}, largest difference ${worst.toExponential(1)}`);
    await page({ ort, opened, instead, note });
    // Only pages with stored features on the device are useful offline.
    if (note.snapshot && navigator.serviceWorker) await navigator.serviceWorker.register("worker.js");
    document.body.dataset.ready = "yes";
  } catch (error) {
    checks.replaceChildren();
    show("bad", error.message);
    document.body.dataset.ready = "no";
  }
}
