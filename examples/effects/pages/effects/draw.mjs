// Draws a photograph as the model does: no pixel leaves the device.

import { begin } from "./begin.mjs";

const context = (name) => document.querySelector(name).getContext("2d");

/** Pixels, of so many bytes each, as the model takes them: red, green and blue planes from 0 to 1. */
function planes(data, bytes, width, height) {
  const found = new Float32Array(3 * width * height);
  for (let place = 0; place < width * height; place += 1) {
    for (let color = 0; color < 3; color += 1) found[color * width * height + place] = data[place * bytes + color] / 255;
  }
  return found;
}

/** The reverse. */
function pixels(values, width, height) {
  const image = new ImageData(width, height);
  for (let place = 0; place < width * height; place += 1) {
    for (let color = 0; color < 3; color += 1) image.data[place * 4 + color] = values[color * width * height + place] * 255;
    image.data[place * 4 + 3] = 255;
  }
  return image;
}

begin(async ({ ort, opened }) => {
  const [, , height, width] = opened.manifest.tensors[0].shape;
  const draw = async (values) => {
    context("#shown").putImageData(pixels(values, width, height), 0, 0);
    const began = performance.now();
    const { picture } = await opened.session.run({ image: new ort.Tensor("float32", values, [1, 3, height, width]) });
    const spent = performance.now() - began;
    context("#drawn").putImageData(pixels(picture.data, width, height), 0, 0);
    document.querySelector("#spent").textContent = `${spent.toFixed(0)} ms for a frame of ${width} x ${height} in this browser`;
  };
  await draw(planes(new Uint8Array(await opened.file("image.rgb")), 3, width, height));

  const form = document.querySelector("#form");
  form.elements.photograph.onchange = async (event) => {
    const [file] = event.target.files;
    if (!file) return;
    const output = document.querySelector("#spent");
    try {
      const image = await createImageBitmap(file);
      const side = Math.min(image.width, image.height);
      const canvas = new OffscreenCanvas(width, height).getContext("2d");
      canvas.drawImage(image, (image.width - side) / 2, (image.height - side) / 2, side, side, 0, 0, width, height);
      await draw(planes(canvas.getImageData(0, 0, width, height).data, 4, width, height));
    } catch (error) {
      output.textContent = `${file.name} is no image that this browser reads: ${error.message}`;
    }
  };
  form.hidden = false;
});
