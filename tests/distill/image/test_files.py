"""Images are decoded once, and their copies depend on seed and pixels alone."""

import struct
import zlib
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from isthmus.distill.image.files import ImageFiles, augmented
from isthmus.distill.types import Array
from isthmus.features.errors import DataError
from isthmus.features.progress import silent

DRAW = np.random.default_rng(0)
PIXELS = DRAW.integers(0, 256, (12, 20, 3), np.uint8)


def read(root: Path, *names: str | None, side: int = 12) -> ImageFiles:
    return ImageFiles(pa.chunked_array([pa.array(names, pa.string())]), root, side, 2, "column file", silent)


def test_a_file_gives_its_middle_square_once(tmp_path: Path) -> None:
    Pillow.fromarray(PIXELS).save(tmp_path / "a.png")
    files = read(tmp_path, "a.png", None, "a.png")
    assert files.pixels.shape == (1, 3, 12, 12)
    images = files[np.array([2, 1, 0])]
    expected = (PIXELS[:, 4:16] / 255).astype(np.float32).transpose(2, 0, 1)
    np.testing.assert_array_equal(images[[0, 2]], [expected, expected])
    assert np.isnan(images[1]).all()


def test_sizes_are_scaled_and_orientation_is_followed(tmp_path: Path) -> None:
    tall = np.repeat(np.repeat(PIXELS.transpose(1, 0, 2), 4, 0), 4, 1)
    tags = Pillow.Exif()
    tags[0x0112] = 6  # stored on its side
    Pillow.fromarray(np.rot90(PIXELS)).save(tmp_path / "turned.png", exif=tags)
    Pillow.fromarray(tall).save(tmp_path / "tall.png")
    Pillow.fromarray(PIXELS).convert("RGBA").save(tmp_path / "alpha.png")
    Pillow.fromarray(PIXELS).convert("L").save(tmp_path / "gray.jpg")
    turned, small, alpha, gray = read(tmp_path, "turned.png", "tall.png", "alpha.png", "gray.jpg")[np.arange(4)]
    np.testing.assert_array_equal(turned, alpha)
    means = tall[16:64].reshape(12, 4, 12, 4, 3).mean((1, 3)).transpose(2, 0, 1) / 255
    assert np.corrcoef(small.ravel(), means.ravel())[0, 1] > 0.95
    np.testing.assert_array_equal(gray[0], gray[2])


def test_another_pixel_is_another_digest(tmp_path: Path) -> None:
    Pillow.fromarray(PIXELS).save(tmp_path / "a.png")
    first = read(tmp_path, "a.png").digest()
    other = PIXELS.copy()
    other[5, 10, 0] ^= 1
    Pillow.fromarray(other).save(tmp_path / "a.png")
    assert read(tmp_path, "a.png").digest() != first


def deep_colors() -> bytes:
    """A PNG file of one pixel with 16 bits per channel, which Pillow calls RGB."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(7))),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.png", r"1 of 2 files are missing, such as 'absent.png'"),
        ("../good.png", r"such as '../good.png'"),
        ("text.png", r"text.png cannot be decoded"),
        ("cut.png", r"cut.png cannot be decoded"),
        ("deep.png", r"deep.png has more than 8 bits per channel"),
        ("colors.png", r"colors.png has more than 8 bits per channel"),
        ("image.gif", r"image.gif cannot be decoded"),
        ("x" * 300 + ".png", r"1 of 2 files are missing"),
    ],
)
def test_a_file_that_is_no_image_is_named(tmp_path: Path, name: str, message: str) -> None:
    Pillow.fromarray(PIXELS).save(tmp_path / "good.png")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:200])
    Pillow.fromarray(PIXELS[..., 0].astype(np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "colors.png").write_bytes(deep_colors())
    Pillow.fromarray(PIXELS).save(tmp_path / "image.gif")
    with pytest.raises(DataError, match=message):
        read(tmp_path, "good.png", name)


@pytest.mark.filterwarnings("ignore")  # Pillow's, about damaged tags
@given(st.sampled_from(["PNG", "JPEG"]), st.integers(0, 10_000), st.integers(1, 255), st.booleans())
@settings(max_examples=max(300, settings().max_examples), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_an_image_or_an_error(tmp_path: Path, kind: str, place: int, bits: int, cut: bool) -> None:
    tags = Pillow.Exif()
    tags[0x0112] = 6
    written = BytesIO()
    Pillow.fromarray(PIXELS).save(written, kind, exif=tags)
    content = bytearray(written.getvalue())
    content[place % len(content)] ^= bits
    (tmp_path / "damaged").write_bytes(content[: place % len(content)] if cut else content)
    with suppress(DataError):
        assert read(tmp_path, "damaged").pixels.shape == (1, 3, 12, 12)


def naive(image: Array, seed: int, digest: bytes, *, mirror: bool) -> Array:
    """The same copy, pixel by pixel."""
    random: Any = np.random.default_rng([seed, *digest])
    gamma, gains = np.exp(random.normal(0, 0.3)), np.exp(random.normal(0, 0.15, (3, 1, 1)))[:, 0, 0]
    side = image.shape[1]
    most = side // 10
    down, right = random.integers(0, 2 * most + 1, 2) - most
    turned = mirror and random.random() < 0.5
    found = np.empty_like(image)
    for color in range(3):
        for y in range(side):
            for x in range(side):
                across = side - 1 - x if turned else x
                row, column = min(max(y + down, 0), side - 1), min(max(across + right, 0), side - 1)
                found[color, y, x] = min(image[color, row, column] ** gamma * gains[color], 1)
    return found


@given(st.integers(1, 2**31), st.binary(min_size=32, max_size=32), st.booleans())
def test_a_copy_is_what_its_seed_and_pixels_say(seed: int, digest: bytes, mirror: bool) -> None:
    image = (PIXELS[:, :12] / 255).astype(np.float32).transpose(2, 0, 1)
    found = augmented(image, seed, digest, mirror=mirror)
    np.testing.assert_allclose(found, naive(image, seed, digest, mirror=mirror), atol=1e-5)
    assert found.dtype == np.float32
    assert 0 <= found.min() <= found.max() <= 1
