"""Data sets by name: shapes, types, normalisation, and an error with advice for every damage."""

import os
import pickle
import struct
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torchvision
from sklearn.datasets import load_digits

from fedstrat.data import sources
from fedstrat.data.sources import NAMED, load
from fedstrat.errors import DataError

REAL = Path(os.environ.get("FEDSTRAT_DATA") or Path(__file__).parents[3] / "shared" / "data")


def real(name):
    if not (REAL / name).is_dir():
        pytest.skip(f"no real data in {REAL / name}; set FEDSTRAT_DATA to a folder that holds {name}/")
    return str(REAL / name)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise URLError("no network in tests")

    for module in (torchvision.datasets.mnist, torchvision.datasets.cifar):
        monkeypatch.setattr(module, "download_and_extract_archive", refuse)


class OldDtype:
    """Pickles a dtype with a number for a boolean, like Python 2's NumPy: some versions warn of it."""

    def __reduce__(self):
        return np.dtype, ("u1", 0)


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_mnist_like(folder, prefixes):
    generator = np.random.default_rng(1)
    parts = []
    for prefix, count in zip(prefixes, (5, 3), strict=True):
        x, y = generator.integers(0, 256, (count, 28, 28)), generator.integers(0, 10, count)
        write_idx(folder / f"{prefix}-images-idx3-ubyte", x)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", y)
        parts.append((x, y))
    return parts


def test_digits_are_the_installed_ones_in_zero_to_one():
    source = load("digits")
    reference = load_digits()
    assert source.x.dtype == np.float32
    assert source.input_shape == (1, 8, 8) == NAMED["digits"].input_shape
    np.testing.assert_array_equal(source.x.reshape(-1, 64) * 16, reference.data)
    np.testing.assert_array_equal(source.y, reference.target)
    assert source.y.dtype == np.int64
    assert (source.num_classes, source.num_train) == (10, 1797)
    np.testing.assert_array_equal(source.features(np.array([3, 1])), source.x[[3, 1]])


def test_cached_arrays_can_not_be_changed():
    source = load("digits")
    assert load("digits") is source
    with pytest.raises(ValueError, match="read-only"):
        source.x[0] = 0
    source.features(np.arange(3))[:] = 7  # a copy
    assert source.x.max() == 1


@pytest.mark.parametrize(
    ("name", "folder", "prefixes"),
    [
        ("mnist", "MNIST", ("train", "t10k")),
        ("fashion-mnist", "FashionMNIST", ("train", "t10k")),
        ("emnist", "EMNIST", ("emnist-byclass-train", "emnist-byclass-test")),
    ],
)
def test_mnist_family_from_a_local_folder(tmp_path, name, folder, prefixes):
    (x, y), (test_x, test_y) = write_mnist_like(tmp_path / folder / "raw", prefixes)
    source = load(name, str(tmp_path))
    pooled = np.concatenate([x, test_x])[:, np.newaxis]
    if name == "emnist":
        pooled = pooled.swapaxes(2, 3)
    np.testing.assert_array_equal(source.x, pooled)
    np.testing.assert_array_equal(source.y, np.concatenate([y, test_y]))
    assert (source.x.dtype, source.input_shape) == (np.uint8, (1, 28, 28))
    assert (source.num_train, source.num_classes) == (5, NAMED[name].num_classes)
    mean, std = NAMED[name].mean[0], NAMED[name].std[0]
    chosen = np.array([6, 0])
    np.testing.assert_allclose(source.features(chosen), (pooled[chosen] / 255 - mean) / std, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "folder", "files", "key", "meta"),
    [
        (
            "cifar10",
            "cifar-10-batches-py",
            [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"],
            "labels",
            ("batches.meta", "label_names"),
        ),
        ("cifar100", "cifar-100-python", ["train", "test"], "fine_labels", ("meta", "fine_label_names")),
    ],
)
def test_cifar_from_a_local_folder(tmp_path, monkeypatch, name, folder, files, key, meta):
    # The md5 sums in torchvision are the real files'.
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda path, md5=None: Path(path).exists())
    generator = np.random.default_rng(2)
    (tmp_path / folder).mkdir()
    x, y = [], []
    for file in files:
        x.append(generator.integers(0, 256, (2, 3072), dtype=np.uint8))
        y += (labels := generator.integers(0, NAMED[name].num_classes, 2).tolist())
        (tmp_path / folder / file).write_bytes(pickle.dumps({"data": x[-1], key: labels, "old": OldDtype()}))
    (tmp_path / folder / meta[0]).write_bytes(pickle.dumps({meta[1]: []}))
    source = load(name, str(tmp_path))
    np.testing.assert_array_equal(source.x, np.concatenate(x).reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(source.y, y)
    assert source.x.flags.c_contiguous
    assert source.num_train == len(y) - 2
    assert source.augmented == (name == "cifar10")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "emnist", "cifar10", "cifar100"])
def test_missing_set_without_network_says_where_and_how(tmp_path, name):
    with pytest.raises(DataError) as caught:
        load(name, str(tmp_path / "nowhere"))
    message = str(caught.value)
    assert str(tmp_path / "nowhere") in message
    assert "no network in tests" in message
    assert "dataset.dir" in message


def test_damaged_file_is_a_data_error(tmp_path):
    write_mnist_like(tmp_path / "MNIST" / "raw", ("train", "t10k"))
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="damaged"):
        load("mnist", str(tmp_path))


def test_download_goes_to_the_folder_only_when_it_is_missing(tmp_path, monkeypatch):
    fetched = []

    def fetch(url, download_root, **kwargs):
        fetched.append(url)
        write_mnist_like(Path(download_root), ("train", "t10k"))

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", fetch)
    assert len(load("mnist", str(tmp_path)).y) == 8
    assert fetched
    fetched.clear()
    sources._load.cache_clear()
    assert len(load("mnist", str(tmp_path)).y) == 8
    assert not fetched


def test_default_folder_is_named_after_the_set(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSTRAT_DATA", str(tmp_path))
    assert sources.folder("mnist") == tmp_path / "mnist"
    monkeypatch.delenv("FEDSTRAT_DATA")
    assert sources.folder("mnist") == Path.home() / ".fedstrat" / "data" / "mnist"
    assert sources.folder("mnist", "some/where") == Path.cwd() / "some" / "where"


def test_unknown_name_gets_the_nearest():
    with pytest.raises(DataError, match=r"unknown dataset\.name 'cifar-10'; did you mean 'cifar10'"):
        load("cifar-10")


def test_real_mnist_has_the_statistics_that_normalise_it():
    source = load("mnist", real("mnist"))
    assert (source.x.shape, source.num_train) == ((70_000, 1, 28, 28), 60_000)
    pixels = source.x[:60_000] / np.float32(255)
    assert pixels.mean() == pytest.approx(NAMED["mnist"].mean[0], abs=1e-4)
    assert pixels.std() == pytest.approx(NAMED["mnist"].std[0], abs=1e-4)


def test_real_cifar10_has_the_statistics_that_normalise_it():
    source = load("cifar10", real("cifar10"))
    assert (source.x.shape, source.num_train) == ((12_000, 3, 32, 32), 10_000)
    pixels = source.x / np.float32(255)
    assert pixels.mean(axis=(0, 2, 3)) == pytest.approx(NAMED["cifar10"].mean, abs=5e-3)
    assert pixels.std(axis=(0, 2, 3)) == pytest.approx(NAMED["cifar10"].std, abs=5e-3)
