// Predictions on a device from request fields and stored features, with a fallback if the features are too old.

import { feeds } from "./model.mjs";
import { SnapshotError } from "./snapshot.mjs";

/** Predicts rows with a model, the stored features on the device, and a fallback without them. */
export class Predictor {
  /**
   * @param ort onnxruntime-web; null with a `core`.
   * @param opened the package, from `open`. If another runtime runs the numeric core: `head`, a Head of `head.mjs`, and
   *   `core`, a function from the tensors of a row by name to the answer or a Promise of it.
   * @param snapshots the stored features; null if the caller passes all features.
   * @param instead the fallback package named in the manifest for stored features that are too old, or null.
   */
  constructor(ort, opened, snapshots = null, instead = null) {
    Object.assign(this, { ort, opened, snapshots, instead });
  }

  /**
   * Predict a row of join keys and request fields, by the names of the model's inputs.
   *
   * `value` is a number, or the name of the most likely class of a classifier (null without an answer); with several
   * classes per row, a list of those with a probability above 0.5. `probabilities` has the probability of each class by name.
   *
   * `by` is "model", "instead" or "default", and `why` the reason if it is not "model". Throws a SnapshotError if the
   * stored features are too old or missing and no fallback is declared.
   */
  async predict(row) {
    const { snapshots, instead } = this;
    if (!snapshots) return this.run(this.opened, row, "model");
    try {
      snapshots.require();
    } catch (error) {
      const { stale = null, instead: named = null } = snapshots.device;
      if (!(error instanceof SnapshotError) || (stale === null && named === null)) throw error;
      if (stale !== null) return { value: stale, by: "default", why: error.message };
      if (!instead) throw error;
      return { ...(await this.run(instead, row, "instead")), why: error.message };
    }
    return this.run(this.opened, { ...row, ...snapshots.features(row) }, "model");
  }

  async run({ manifest, session, head = null, core = null }, row, by) {
    if (head) {
      const { tensors, refused } = head.row(row);
      return { value: refused ? NaN : await core(tensors), by, why: null };
    }
    const answers = await session.run(feeds(this.ort, manifest, [row]));
    const numbers = [...answers[manifest.outputs[0].name].data];
    if (!manifest.classes) return { value: numbers[0], by, why: null };
    const likely = manifest.several ? manifest.classes.filter((_, n) => numbers[n] > 0.5) : manifest.classes[numbers.indexOf(Math.max(...numbers))];
    const value = numbers.some(Number.isNaN) ? null : likely;
    return { value, probabilities: Object.fromEntries(manifest.classes.map((name, n) => [name, numbers[n]])), by, why: null };
  }
}
