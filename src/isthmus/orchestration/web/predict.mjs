// A prediction on a device: the row from what is asked and what is stored, the model, and what answers where that is too old.

import { feeds } from "./model.mjs";
import { SnapshotError } from "./snapshot.mjs";

/** What answers rows: a model, with the features on the device, and what answers without them. */
export class Predictor {
  /**
   * @param ort onnxruntime-web; null if the core answers.
   * @param opened the package, of `open`; or, where another runtime has its numeric core, `head`, a Head of `head.mjs`, and
   *   `core`, which gives the answer, or a Promise of it, for the tensors of a row by name.
   * @param snapshots of its stored features; null if whoever asks brings them.
   * @param instead the package that the manifest names for when they are too old; null if it names none.
   */
  constructor(ort, opened, snapshots = null, instead = null) {
    Object.assign(this, { ort, opened, snapshots, instead });
  }

  /**
   * The answer to a row of join keys and request fields, by the names of the model's inputs.
   *
   * `value` is a number; of a model of classes it is the name of the likeliest, null where the model has no answer, and
   * `probabilities` has that of each class by its name.
   *
   * `by` is "model", "instead" or "default"; `why` is the reason where it is not the model. Throws a SnapshotError where
   * the stored features are too old or missing and nothing is declared for that.
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
    const value = numbers.some(Number.isNaN) ? null : manifest.classes[numbers.indexOf(Math.max(...numbers))];
    return { value, probabilities: Object.fromEntries(manifest.classes.map((name, n) => [name, numbers[n]])), by, why: null };
  }
}
