"""The images of a training set: decoded once, and copies in another light."""

import hashlib
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from isthmus.distill.language.teachers import within
from isthmus.distill.tasks.task import Material
from isthmus.distill.types import Array, Index
from isthmus.features.errors import DataError, extra
from isthmus.features.progress import Progress

SEED = "augmented copy"
"""Column of a training set with copies: 0 for an image as it is, else the number of the copy."""
_EXPOSURE, _COLORS = 0.3, 0.15
"""Standard deviations of the logarithms of gamma, and of the factors of red, green and blue."""
_WIDE = ("I", "F")
"""First letters of Pillow's modes with more than 8 bits per channel."""


class ImageFiles:
    """The images of n rows, of which each file is decoded once.

    Attributes:
        pixels: uint8 (files, 3, side, side).
        places: index in `pixels` of each row's image, (n,); -1 for a row without one.
        digests: SHA-256 of the pixels of each file.

    Args:
        column: paths relative to `root`; null for no image.
        root: folder of the project.
        side: pixels of a side: larger and smaller images are scaled, after the largest square in the middle is cut out.
        threads: files to decode at once.
        where: name of the column, for messages.
        progress: called with a text and the finished share.

    Raises:
        DataError: a file is missing, is not a PNG or JPEG file of 8 bits per channel, or is damaged.
        DependencyError: Pillow is not installed.
    """

    def __init__(
        self, column: pa.ChunkedArray, root: Path, side: int, threads: int, where: str, progress: Progress
    ) -> None:
        coded = column.combine_chunks().dictionary_encode()
        paths, self.side = coded.dictionary.to_pylist(), side
        self.places: Index = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        if wrong := [path for path in paths if not (within(path) and _is_file(root / path))]:
            found = f"{len(wrong):,} of {len(paths):,} files are missing, such as {wrong[0]!r}"
            raise DataError(where, found, expected=f"paths of files relative to {root}")
        self.pixels = np.empty((len(paths), 3, side, side), np.uint8)
        with ThreadPoolExecutor(threads) as pool:
            for place, image in enumerate(pool.map(lambda path: _decoded(root / path, side, where), paths)):
                self.pixels[place] = image
                if place % 1000 == 999:
                    progress(f"{place + 1:,} of {len(paths):,} images read", (place + 1) / len(paths))
        self.digests = [hashlib.sha256(image.data).digest() for image in self.pixels]

    def digest(self) -> str:
        """Return a SHA-256 over the digests of all rows' pixels; a row without an image counts as zeros."""
        names = [self.digests[place] if place >= 0 else bytes(32) for place in self.places]
        return hashlib.sha256(b"".join(names)).hexdigest()

    def __getitem__(self, rows: Index) -> Array:
        """Return images, float32 (rows, 3, side, side) in [0, 1]; NaN for rows without one."""
        found = np.full((len(rows), *self.pixels.shape[1:]), np.nan, np.float32)
        known = self.places[rows] >= 0
        found[known] = self.pixels[self.places[rows[known]]] / np.float32(255)
        return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _decoded(file: Path, side: int, where: str) -> Array:
    with extra("image"):
        from PIL import Image, ImageOps
    remedy = "repair the file or leave its row out of the spine"
    try:
        with Image.open(file, formats=("PNG", "JPEG")) as image:
            wide = image.mode.startswith(_WIDE) or ";16" in str(image.tile)  # a mode hides the 16 bits of colors
            upright = ImageOps.exif_transpose(image).convert("RGB")
        fitted = ImageOps.fit(upright, (side, side), Image.Resampling.BILINEAR)
    except (
        OSError,
        SyntaxError,
        ValueError,
        struct.error,
        Image.DecompressionBombError,
    ) as error:  # SyntaxError: a damaged PNG
        found = f"{file} cannot be decoded: {error}"
        raise DataError(where, found, expected="a PNG or JPEG file", remedy=remedy) from error
    if wide:
        raise DataError(where, f"{file} has more than 8 bits per channel", expected="8 bits", remedy=remedy)
    return np.asarray(fitted).transpose(2, 0, 1)


def with_copies(material: Material, copies: int) -> Material:
    """Return material whose training part also has `copies` of each of its rows, numbered in the column `SEED`."""
    table, parts = material.table, material.parts
    added = table.take(np.tile(parts.train, copies))
    seeds = np.repeat(np.arange(copies + 1), [len(table), *[len(parts.train)] * copies])
    whole = pa.concat_tables([table, added]).append_column(SEED, pa.array(seeds))
    train = np.concatenate([parts.train, np.arange(len(table), len(whole))])
    return replace(material, table=whole, division=replace(parts, train=train))


def augmented(image: Array, seed: int, digest: bytes, *, mirror: bool) -> Array:
    """Return an image, float32 (3, side, side) in [0, 1], with another exposure and other colors, shifted and mirrored.

    Edges are repeated where the shift leaves a gap. With `mirror`, half of the images are mirrored. The result depends
    only on the arguments, so that outputs of a teacher can be cached; `digest` is that of the pixels.
    """
    random = np.random.default_rng([seed, *digest])
    exposure, gains = random.normal(0, _EXPOSURE), np.exp(random.normal(0, _COLORS, (3, 1, 1)))
    most, side = image.shape[1] // 10, image.shape[1]
    down, right = random.integers(0, 2 * most + 1, 2)
    colors = np.minimum(image ** np.float32(np.exp(exposure)) * gains.astype(np.float32), 1)
    shifted: Array = np.pad(colors, ((0, 0), (most, most), (most, most)), "edge")
    shifted = shifted[:, down : down + side, right : right + side]
    return shifted[:, :, ::-1] if mirror and random.random() < 0.5 else shifted
