"""Data sets by name, as NumPy arrays in memory: ``load(name, directory)``.

========================  =======  ==========  =======================  =======================
name                      classes  shape       where from               normalised with
========================  =======  ==========  =======================  =======================
``digits``                10       1 x 8 x 8   scikit-learn's install   pixels / 16, in [0, 1]
``mnist``                 10       1 x 28 x 28 torchvision              its mean and deviation
``fashion-mnist``         10       1 x 28 x 28 torchvision              its mean and deviation
``emnist`` (by class)     62       1 x 28 x 28 torchvision              MNIST's
``femnist``               62       1 x 28 x 28 Hugging Face hub         MNIST's
``cifar10``               10       3 x 32 x 32 torchvision              per channel
``cifar100`` (fine)       100      3 x 32 x 32 torchvision              per channel
``dbpedia14``             14       words       Hugging Face hub         –
``npz``                   as held  as held     your own folder          uint8 / 255; floats: none
``csv``                   as held  words       your own folder          –
``images``                as held  as held     your own folder          pixels / 255
========================  =======  ==========  =======================  =======================

The official train and test parts are pooled, train first: in a simulation every client splits its own share.
Pixels stay uint8 until a client asks for its part. ``emnist`` is the ``byclass`` split, whose 62 classes are
those of FEMNIST and of the published tables; like FEMNIST in CRAFT's experiments it takes MNIST's statistics.

Files of a torchvision set are looked for in ``directory``, in torchvision's own layout or as ``train.npz``
and ``test.npz``; without a directory in ``$FEDSTRAT_DATA/<name>`` or ``~/.fedstrat/data/<name>``. Only a set
that isn't there is downloaded, into the same folder. ``femnist`` knows the writer of every sample. How texts become
word ids is told in :mod:`fedstrat.data.text`, the layout of picture folders in :mod:`fedstrat.data.images`.
"""

import contextlib
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstrat.data import hub, images, text
from fedstrat.data.files import Raw, has_torchvision, read_npz, read_torchvision
from fedstrat.errors import DataError, nearest


@dataclass(frozen=True)
class NamedSet:
    """What is known of a named set without reading it.

    Attributes:
        input_shape: (channels, height, width); empty for texts, whose length the run config says.
        num_classes: K.
        mean: Mean per channel of pixels in [0, 1]; empty for no normalisation.
        std: Deviation per channel of pixels in [0, 1].
        augmented: Whether training batches are cropped and flipped at random, as in CRAFT's experiments.
        torchvision: Name of torchvision's class; empty for none.
        hub: Its name on the Hugging Face hub; empty for none.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augmented: bool = False
    torchvision: str = ""
    hub: str = ""


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
    "femnist": NamedSet((1, 28, 28), 62, (0.1307,), (0.3081,), hub="flwrlabs/femnist"),
    "dbpedia14": NamedSet((), 14, hub="fancyzhx/dbpedia_14"),
}
OWN = ("npz", "csv", "images")
"""Kinds of files of one's own; what they hold is only known where they are."""
SOURCES = (*NAMED, *OWN)
TEXTS = ("dbpedia14", "csv")
"""The sets of texts, whose samples are word ids."""


class Reading(NamedTuple):
    """How files are read, as far as they don't say it themselves.

    Attributes:
        coding: How texts become word ids.
        image_size: Side in pixels that the pictures of ``images`` are brought to; 0 keeps them.
    """

    coding: text.Coding = text.Coding()
    image_size: int = 0


@dataclass(frozen=True, eq=False)
class Source:
    """A data set in memory, read-only and shared by all clients of a process.

    Attributes:
        name: Its name, one of :data:`SOURCES`.
        x: Inputs, shape (n, *input_shape): uint8 pixels, channels first, or float32, or int32 word ids.
        y: Class of each sample, int64 of shape (n,), in [0, num_classes).
        num_classes: K.
        num_train: How many samples, from the first, are the official train part; n without a test part.
        mean: Mean per channel of pixels in [0, 1]; empty for no normalisation.
        std: Deviation per channel of pixels in [0, 1].
        augmented: Whether training batches are cropped and flipped at random.
        groups: Who a sample comes from, for example its writer, int64 (n,); None where it isn't known.
        vocab_size: Number of word ids for texts, else 0.
        files: Name, time and size of the files that it was read from; empty where it has none of its own.
    """

    name: str
    x: NDArray[Any]
    y: NDArray[np.int64]
    num_classes: int
    num_train: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augmented: bool = False
    groups: NDArray[np.int64] | None = None
    vocab_size: int = 0
    files: tuple[tuple[str, int, int], ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample: (channels, height, width), (d,) for plain vectors, (words,) for texts."""
        return tuple(self.x.shape[1:])

    def features(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Return the inputs of these samples as a copy: float32 and normalised, or int64 word ids."""
        x = self.x[indices]
        if self.vocab_size:
            return x.astype(np.int64)
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
        DataError: One of :data:`OWN` without a directory.
    """
    if directory:
        return Path(directory).expanduser().absolute()
    if name in OWN:
        what = {
            "npz": "train.npz (arrays x and y) and, if there is one, test.npz",
            "csv": "train.csv (label, text) and, if there is one, test.csv",
            "images": "a sub-folder of pictures per class",
        }[name]
        raise DataError(
            f"dataset.name '{name}' reads {what} from the folder dataset.dir, but dataset.dir is empty; set it in the"
            " run config (simulation) or in the node config (a node with private data)"
        )
    root = os.environ.get("FEDSTRAT_DATA", "")
    return (Path(root) if root else Path.home() / ".fedstrat" / "data").expanduser().absolute() / name


def load(name: str, directory: str = "", reading: Reading = Reading()) -> Source:  # noqa: B008  # it is immutable
    """Load a data set, from memory when this process has loaded it before and its files haven't changed.

    Args:
        name: One of :data:`SOURCES`.
        directory: Folder of its files; not needed for ``digits``, required for those of :data:`OWN`.
        reading: How its files are read.

    Raises:
        DataError: The name is unknown, or its files are missing, damaged or not what the name says.
    """
    if name not in SOURCES:
        raise DataError(f"unknown dataset.name '{name}'{nearest(name, SOURCES)} There are: {', '.join(SOURCES)}")
    if name == "digits":
        return _digits()
    where = folder(name, directory)
    if name in NAMED and NAMED[name].hub and not stamp(name, where):
        hub.fetch(name, NAMED[name].hub, where)
    return _load(name, where, reading, stamp(name, where))


def forget() -> None:
    """Give back the memory of the data sets that :func:`load` keeps."""
    _load.cache_clear()


def at_hand(name: str, directory: str = "") -> bool:
    """Return whether ``load`` would read this set, or refuse it, without any download; touches no network itself.

    Args:
        name: As for :func:`load`.
        directory: As for :func:`load`.
    """
    if name == "digits" or name not in NAMED:
        return True
    where = folder(name, directory)
    return bool(stamp(name, where)) or has_torchvision(NAMED[name].torchvision, where)


def stamp(name: str, where: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, time and size of the files of a folder: a cached copy serves while these stay the same."""
    if name in TEXTS:
        found = tuple(map(str, text.files(where)))
    elif name == "images":
        found = tuple(map(str, images.files(where)))
    else:
        found = (f"{where}/train.npz", f"{where}/test.npz")
    stamps = []
    for path in found:
        with contextlib.suppress(FileNotFoundError):
            about = os.stat(path)  # noqa: PTH116  # every client call asks, and a Path costs more than the question
            stamps.append((path, about.st_mtime_ns, about.st_size))
    return tuple(stamps)


@functools.lru_cache(maxsize=1)
def _digits() -> Source:
    from sklearn.datasets import load_digits  # noqa: PLC0415  # takes a second: only where it is needed

    digits = load_digits()
    x = (digits.images[:, np.newaxis] / 16).astype(np.float32)
    return _source("digits", Raw(x, digits.target.astype(np.int64), len(x), 10))


@functools.lru_cache(maxsize=8)
def _load(name: str, where: Path, reading: Reading, files: tuple[tuple[str, int, int], ...]) -> Source:
    if name in TEXTS:
        raw = text.read_csv(where, reading.coding)
    elif name == "images":
        raw = images.read_images(where, reading.image_size)
    elif files or name == "npz":
        raw = read_npz(where)
    else:
        raw = read_torchvision(name, NAMED[name].torchvision, where)
    if name in NAMED:
        _check(name, raw, where)
    return _source(name, raw, files)


def _check(name: str, raw: Raw, where: Path) -> None:
    """Refuse files that aren't what the name says."""
    known = NAMED[name]
    if name in TEXTS:
        if raw.num_classes > known.num_classes:
            raise DataError(
                f"expected the '{name}' files in {where} to hold texts in {known.num_classes} classes, but they hold"
                f" {raw.num_classes}; rows of two fields count classes from 0, rows of three from 1. For a set of"
                " your own use dataset.name 'csv'"
            )
    elif raw.x.dtype != np.uint8 or raw.x.shape[1:] != known.input_shape or raw.num_classes > known.num_classes:
        raise DataError(
            f"expected the '{name}' files in {where} to hold uint8 images of shape {known.input_shape} in"
            f" {known.num_classes} classes, but they hold {raw.x.dtype} of shape {raw.x.shape[1:]} in"
            f" {raw.num_classes} classes; for a set of your own use dataset.name 'npz'"
        )


def _source(name: str, raw: Raw, files: tuple[tuple[str, int, int], ...] = ()) -> Source:
    for array in (raw.x, raw.y, raw.groups):
        if array is not None:
            array.setflags(write=False)
    known = NAMED.get(name, NamedSet((), raw.num_classes))
    return Source(
        name,
        raw.x,
        raw.y,
        known.num_classes,
        raw.num_train,
        known.mean,
        known.std,
        augmented=known.augmented,
        groups=raw.groups,
        vocab_size=raw.vocab_size,
        files=files,
    )
