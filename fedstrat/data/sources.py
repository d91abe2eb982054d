"""Data sets by name, as NumPy arrays in memory: ``load(name, directory)``.

========================  =======  ==========  =======================  =======================
name                      classes  shape       where from               normalised with
========================  =======  ==========  =======================  =======================
``digits``                10       1 x 8 x 8   scikit-learn's install   pixels / 16, in [0, 1]
``mnist``                 10       1 x 28 x 28 torchvision              its mean and deviation
``fashion-mnist``         10       1 x 28 x 28 torchvision              its mean and deviation
``emnist`` (by class)     62       1 x 28 x 28 torchvision              MNIST's
``cifar10``               10       3 x 32 x 32 torchvision              per channel
``cifar100`` (fine)       100      3 x 32 x 32 torchvision              per channel
``npz``                   as held  as held     your own folder          uint8 / 255; floats: none
========================  =======  ==========  =======================  =======================

The official train and test parts are pooled, train first: in a simulation every client splits its own share.
Pixels stay uint8 until a client asks for its part. ``emnist`` is the ``byclass`` split, whose 62 classes are
those of FEMNIST and of the published tables; like FEMNIST in CRAFT's experiments it takes MNIST's statistics.

Files of a torchvision set are looked for in ``directory``, in torchvision's own layout or as ``train.npz``
and ``test.npz``; without a directory in ``$FEDSTRAT_DATA/<name>`` or ``~/.fedstrat/data/<name>``. Only a set
that isn't there is downloaded, into the same folder.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrat.data.files import Raw, read_npz, read_torchvision
from fedstrat.errors import DataError, nearest


@dataclass(frozen=True)
class NamedSet:
    """What is known of a named set without reading it.

    Attributes:
        input_shape: (channels, height, width).
        num_classes: K.
        mean: Mean per channel of pixels in [0, 1]; empty for no normalisation.
        std: Deviation per channel of pixels in [0, 1].
        augmented: Whether training batches are cropped and flipped at random, as in CRAFT's experiments.
        torchvision: Name of torchvision's class; empty for none.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augmented: bool = False
    torchvision: str = ""


NAMED = {
    "digits": NamedSet((1, 8, 8), 10),
    "mnist": NamedSet((1, 28, 28), 10, (0.1307,), (0.3081,), torchvision="MNIST"),
    "fashion-mnist": NamedSet((1, 28, 28), 10, (0.2860,), (0.3530,), torchvision="FashionMNIST"),
    "emnist": NamedSet((1, 28, 28), 62, (0.1307,), (0.3081,), torchvision="EMNIST"),
    "cifar10": NamedSet(
        (3, 32, 32),
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        augmented=True,
        torchvision="CIFAR10",
    ),
    "cifar100": NamedSet((3, 32, 32), 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), torchvision="CIFAR100"),
}
SOURCES = (*NAMED, "npz")


@dataclass(frozen=True, eq=False)
class Source:
    """A data set in memory, read-only and shared by all clients of a process.

    Attributes:
        name: Its name, one of :data:`SOURCES`.
        x: Inputs, shape (n, *input_shape): uint8 pixels, channels first, or float32.
        y: Class of each sample, int64 of shape (n,), in [0, num_classes).
        num_classes: K.
        num_train: How many samples, from the first, are the official train part; n without a test part.
        mean: Mean per channel of pixels in [0, 1]; empty for no normalisation.
        std: Deviation per channel of pixels in [0, 1].
        augmented: Whether training batches are cropped and flipped at random.
    """

    name: str
    x: NDArray[Any]
    y: NDArray[np.int64]
    num_classes: int
    num_train: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augmented: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample: (channels, height, width), or (d,) for plain vectors."""
        return tuple(self.x.shape[1:])

    def features(self, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the inputs of these samples, float32 and normalised, as a copy."""
        x = self.x[indices]
        if x.dtype == np.uint8:
            x = x.astype(np.float32)
            x /= 255
        if self.mean:
            x -= np.array(self.mean, dtype=np.float32).reshape(-1, 1, 1)
            x /= np.array(self.std, dtype=np.float32).reshape(-1, 1, 1)
        return x


def folder(name: str, directory: str = "") -> Path:
    """Return the absolute folder in which the files of a set are expected.

    Raises:
        DataError: ``npz`` without a directory.
    """
    if directory:
        return Path(directory).expanduser().absolute()
    if name == "npz":
        raise DataError(
            "dataset.name 'npz' reads train.npz (arrays x and y) and, if there is one, test.npz from the"
            " folder dataset.dir, but dataset.dir is empty; set it in the run config (simulation) or in the"
            " node config (a node with private data)"
        )
    root = os.environ.get("FEDSTRAT_DATA", "")
    return (Path(root) if root else Path.home() / ".fedstrat" / "data").expanduser().absolute() / name


def load(name: str, directory: str = "") -> Source:
    """Load a data set, from memory when this process has loaded it before and its files haven't changed.

    Args:
        name: One of :data:`SOURCES`.
        directory: Folder of its files; not needed for ``digits``, required for ``npz``.

    Raises:
        DataError: The name is unknown, or its files are missing, damaged or not what the name says.
    """
    if name not in SOURCES:
        raise DataError(f"unknown dataset.name '{name}'{nearest(name, SOURCES)} There are: {', '.join(SOURCES)}")
    if name == "digits":
        return _digits()
    where = folder(name, directory)
    return _load(name, where, stamp(where))


def stamp(where: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, time and size of a folder's npz files: a cached copy serves while these stay the same."""
    found = [where / part for part in ("train.npz", "test.npz")]
    return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in found if path.is_file())


@functools.lru_cache(maxsize=1)
def _digits() -> Source:
    from sklearn.datasets import load_digits  # noqa: PLC0415  # takes a second: only where it is needed

    digits = load_digits()
    x = (digits.images[:, np.newaxis] / 16).astype(np.float32)
    return _source("digits", Raw(x, digits.target.astype(np.int64), len(x), 10))


@functools.lru_cache(maxsize=8)
def _load(name: str, where: Path, npz_files: tuple[tuple[str, int, int], ...]) -> Source:
    as_npz = name == "npz" or bool(npz_files)
    raw = read_npz(where) if as_npz else read_torchvision(name, NAMED[name].torchvision, where)
    if name in NAMED:
        known = NAMED[name]
        same = raw.x.dtype == np.uint8 and raw.x.shape[1:] == known.input_shape
        if not same or raw.num_classes > known.num_classes:
            raise DataError(
                f"expected the '{name}' files in {where} to hold uint8 images of shape {known.input_shape} in"
                f" {known.num_classes} classes, but they hold {raw.x.dtype} of shape {raw.x.shape[1:]} in"
                f" {raw.num_classes} classes; for a set of your own use dataset.name 'npz'"
            )
    return _source(name, raw)


def _source(name: str, raw: Raw) -> Source:
    for array in (raw.x, raw.y):
        array.setflags(write=False)
    known = NAMED.get(name, NamedSet((), raw.num_classes))
    return Source(
        name, raw.x, raw.y, known.num_classes, raw.num_train, known.mean, known.std, augmented=known.augmented
    )
