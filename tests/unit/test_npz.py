"""Folders of one's own: ``train.npz`` and ``test.npz``, taken as they are or refused with the reason."""

import re

import numpy as np
import pytest

from fedstrat.data.sources import NAMED, load
from fedstrat.errors import DataError


@pytest.fixture
def images():
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8), np.arange(12) % 10


def test_npz_images_become_channels_first_and_train_comes_first(tmp_path, images):
    x, y = images
    np.savez(tmp_path / "train.npz", x=x[:8], y=y[:8])
    np.savez(tmp_path / "test.npz", x=x[8:], y=y[8:].astype(np.uint8))
    source = load("npz", str(tmp_path))
    np.testing.assert_array_equal(source.x, x.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(source.y, y)
    assert (source.x.dtype, source.y.dtype, source.num_train, source.num_classes) == (
        np.uint8,
        np.int64,
        8,
        10,
    )
    np.testing.assert_allclose(source.features(np.array([5])), source.x[[5]] / 255, rtol=1e-6)
    assert not source.augmented


def test_npz_of_a_named_set_takes_its_statistics(tmp_path, images):
    x, y = images
    np.savez(tmp_path / "train.npz", x=x, y=y)
    source = load("cifar10", str(tmp_path))
    expected = (x[2] / 255 - NAMED["cifar10"].mean) / NAMED["cifar10"].std
    np.testing.assert_allclose(source.features(np.array([2]))[0], expected.transpose(2, 0, 1), rtol=1e-3, atol=1e-5)
    assert source.augmented
    with pytest.raises(DataError, match=r"'mnist' files .* \(1, 28, 28\) in 10 classes, .* \(3, 32, 32\)"):
        load("mnist", str(tmp_path))


@pytest.mark.parametrize(
    ("shape", "becomes"),
    [
        ((4, 9), (9,)),
        ((4, 8, 6), (1, 8, 6)),
        ((4, 8, 6, 1), (1, 8, 6)),
        ((4, 3, 8, 6), (3, 8, 6)),
        ((4, 3, 8, 3), (3, 8, 3)),
        ((4, 16, 5, 5), (16, 5, 5)),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float64])
def test_npz_shapes_and_types(tmp_path, shape, becomes, dtype):
    np.savez(tmp_path / "train.npz", x=np.ones(shape, dtype), y=np.arange(4))
    source = load("npz", str(tmp_path))
    assert source.input_shape == becomes
    assert source.x.dtype == (np.uint8 if dtype == np.uint8 else np.float32)
    assert source.features(np.arange(4)).dtype == np.float32


def test_npz_may_say_how_many_classes_there_are(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.ones((2, 3)), y=[0, 4], num_classes=7)
    assert load("npz", str(tmp_path)).num_classes == 7
    # The cache sees that the file is another one.
    np.savez(tmp_path / "train.npz", x=np.ones((3, 3)), y=[0, 4, 7], num_classes=7)
    with pytest.raises(DataError, match=r"num_classes = 7, but .* has label 7"):
        load("npz", str(tmp_path))


def test_npz_without_samples(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.ones((0, 3)), y=np.zeros(0, dtype=int))
    source = load("npz", str(tmp_path))
    assert source.features(np.zeros(0, dtype=np.int64)).shape == (0, 3)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.ones((2, 3))}, "arrays 'x' and 'y' in .* but it holds x"),
        ({"x": np.ones((2, 3)), "y": np.arange(3)}, r"integers of shape \(2,\).*shape \(3,\)"),
        ({"x": np.ones((2, 3)), "y": np.ones(2)}, "integers of shape .* but got float64"),
        ({"x": np.ones((2, 3)), "y": np.eye(2, dtype=int)}, r"but got int64 of shape \(2, 2\)"),
        ({"x": np.ones((2, 3)), "y": np.array([0, -1])}, "classes from 0 up in 'y' .* but got -1"),
        ({"x": np.ones((2, 3), int), "y": np.arange(2)}, "uint8 pixels or floats .* but got int64"),
        ({"x": np.ones(2), "y": np.arange(2)}, r"but got float64 of shape \(2,\)"),
        ({"x": np.float64(2), "y": np.arange(2)}, r"but got float64 of shape \(\)"),
        ({"x": np.array([[1.0], [np.nan]]), "y": np.arange(2)}, "finite .* row 1 has NaN"),
        ({"x": np.array([[1e300], [1.0]]), "y": np.arange(2)}, "finite .* row 0 has NaN"),
        (
            {"x": np.ones((2, 3)), "y": np.arange(2), "group": np.arange(3)},
            r"'group' of .* \(2,\).* int64 of shape \(3,\)",
        ),
        ({"x": np.ones((2, 3)), "y": np.arange(2), "group": np.ones(2)}, "'group' of .* got float64"),
        ({"x": np.array([{}, 1], dtype=object), "y": np.arange(2)}, "can't be read .* plain arrays"),
    ],
)
def test_npz_of_the_wrong_content(tmp_path, arrays, words):
    np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(DataError, match=re.compile(words, re.DOTALL)):
        load("npz", str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x03\x04 torn"])
def test_npz_that_is_no_npz(tmp_path, content):
    (tmp_path / "train.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"can't be read as a \.npz file"):
        load("npz", str(tmp_path))


def test_npz_may_say_who_a_sample_comes_from(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.ones((2, 3)), y=np.arange(2), group=np.array([7, 7], np.uint8))
    source = load("npz", str(tmp_path))
    assert (source.groups.tolist(), source.groups.dtype) == ([7, 7], np.int64)
    np.savez(tmp_path / "test.npz", x=np.ones((1, 3)), y=[0], group=[4])
    assert load("npz", str(tmp_path)).groups.tolist() == [7, 7, 4]
    np.savez(tmp_path / "test.npz", x=np.ones((1, 3)), y=[0])
    with pytest.raises(DataError, match=r"both files .* or none to hold 'group'"):
        load("npz", str(tmp_path))


def test_npz_parts_must_match(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.ones((2, 3)), y=np.arange(2))
    np.savez(tmp_path / "test.npz", x=np.ones((2, 4)), y=np.arange(2))
    with pytest.raises(DataError, match=r"test\.npz to match train\.npz.*\(3,\).*\(4,\)"):
        load("npz", str(tmp_path))


def test_npz_needs_a_folder_that_exists(tmp_path):
    with pytest.raises(DataError, match=r"dataset\.dir is empty"):
        load("npz")
    with pytest.raises(DataError, match="there is no such folder"):
        load("npz", str(tmp_path / "nowhere"))
    (tmp_path / "other.txt").touch()
    with pytest.raises(DataError, match=r"it holds other\.txt"):
        load("npz", str(tmp_path))
