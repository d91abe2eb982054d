"""Files of data sets -> arrays: ``npz`` folders and torchvision's layouts, with every damage named."""

import logging
import socket
import sys
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstrat.errors import DataError

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

DOWNLOAD_TIMEOUT_SECONDS = 20.0


class Raw(NamedTuple):
    """Arrays as read.

    Attributes:
        x: (n, ...) uint8 pixels, channels first, or float32, or int32 word ids.
        y: Classes, int64 (n,).
        num_train: The first so many are the train part.
        num_classes: K.
        groups: Who a sample comes from, for example its writer, int64 (n,); None if the files don't say.
        vocab_size: Number of word ids for texts, else 0.
    """

    x: NDArray[Any]
    y: NDArray[np.int64]
    num_train: int
    num_classes: int
    groups: NDArray[np.int64] | None = None
    vocab_size: int = 0


def read_npz(where: Path) -> Raw:
    """Read ``train.npz`` and, where there is one, ``test.npz``.

    Each holds ``x`` and ``y``: x of shape (n, d), (n, height, width), (n, height, width, channels) or
    (n, channels, height, width), uint8 or floating; y integers of shape (n,), classes from 0. A last axis of
    1 or 3 is taken for the channels unless axis 1 is 1 or 3 as well. ``train.npz`` may also hold the number
    ``num_classes``, for a folder that lacks the last classes, and each file ``group``: integers of shape (n,) that
    say who a sample comes from, for the partition ``natural``.

    Raises:
        DataError: A file is missing or damaged, or an array isn't as above.
    """
    train, test = where / "train.npz", where / "test.npz"
    if not train.is_file():
        found = sorted(path.name for path in where.iterdir())[:5] if where.is_dir() else None
        state = "there is no such folder" if found is None else f"it holds {', '.join(found) or 'nothing'}"
        raise DataError(
            f"expected train.npz (arrays x and y) in {where}, but {state}; set dataset.dir to the folder that"
            " has it (an absolute path: apps run in another working directory)"
        )
    x, y, group, declared = _read_part(train)
    num_train = len(x)
    if test.is_file():
        test_x, test_y, test_group, _ = _read_part(test)
        if (test_x.dtype, test_x.shape[1:]) != (x.dtype, x.shape[1:]):
            raise DataError(
                f"expected x of {test} to match train.npz, {x.dtype} samples of shape {x.shape[1:]}, but it"
                f" has {test_x.dtype} samples of shape {test_x.shape[1:]}"
            )
        if (group is None) != (test_group is None):
            raise DataError(f"expected both files of {where} or none to hold 'group', but only one does")
        x, y = np.concatenate([x, test_x]), np.concatenate([y, test_y])
        group = None if group is None or test_group is None else np.concatenate([group, test_group])
    num_classes = int(y.max(initial=-1)) + 1
    if declared is not None and num_classes > declared:
        raise DataError(f"{train} says num_classes = {declared}, but {where} has label {num_classes - 1}")
    return Raw(x, y, num_train, num_classes if declared is None else declared, group)


def read_classes(where: Path) -> tuple[str, ...]:
    """Read the names of all classes, in the order of their index, from ``classes.txt``; empty without that file.

    Raises:
        DataError: It can't be read, or names a class twice.
    """
    path = where / "classes.txt"
    if not path.is_file():
        return ()
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as UTF-8 text, a class a line: {_first_line(error)}") from error
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None or not names:
        came = f"it has {twice!r} twice" if names else "it is empty"
        raise DataError(f"expected {path} to name every class once, a line each, but {came}")
    return tuple(names)


def class_index(names: Sequence[str]) -> dict[str, int]:
    """Number the classes from 0, in the order given."""
    return {name: index for index, name in enumerate(names)}


def _read_part(path: Path) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64] | None, int | None]:
    try:
        # Opened here, since np.load leaves a file open that turns out to be a torn archive.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {key: file[key] for key in ("x", "y", "group", "num_classes") if key in file}
            held = list(file)
        declared = int(arrays["num_classes"]) if "num_classes" in arrays else None
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(
            f"{path} can't be read as a .npz file of plain arrays: {_first_line(error)}; write it with"
            " numpy.savez(path, x=x, y=y), arrays of numbers only"
        ) from error
    if not {"x", "y"} <= arrays.keys():
        raise DataError(f"expected arrays 'x' and 'y' in {path}, but it holds {', '.join(held) or 'none'}")
    x, y = _inputs(arrays["x"], path), arrays["y"]
    if y.ndim != 1 or y.dtype.kind not in "iu" or len(y) != len(x):
        raise DataError(
            f"expected 'y' of {path} to be integers of shape ({len(x)},), one class per row of x, but got"
            f" {y.dtype} of shape {y.shape}"
        )
    if len(y) and int(y.min()) < 0:
        raise DataError(f"expected classes from 0 up in 'y' of {path}, but got {y.min()}")
    group = arrays.get("group")
    if group is not None and (group.dtype.kind not in "iu" or group.shape != y.shape):
        raise DataError(
            f"expected 'group' of {path} to be integers of shape ({len(x)},), who each row of x comes from, but got"
            f" {group.dtype} of shape {group.shape}"
        )
    return x, y.astype(np.int64), None if group is None else group.astype(np.int64), declared


def _inputs(x: NDArray[Any], path: Path) -> NDArray[Any]:
    """Bring x to uint8 or float32, channels first."""
    if not (x.dtype == np.uint8 or x.dtype.kind == "f") or x.ndim not in (2, 3, 4):
        raise DataError(
            f"expected 'x' of {path} to be uint8 pixels or floats of shape (n, d), (n, height, width),"
            " (n, height, width, channels) or (n, channels, height, width), but got"
            f" {x.dtype} of shape {x.shape}"
        )
    if x.ndim == 3:
        x = x[:, np.newaxis]
    elif x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what float32 can't hold is found below
            x = x.astype(np.float32)
        finite = np.isfinite(x).reshape(len(x), -1).all(axis=1) if x.size else np.ones(len(x), dtype=bool)
        if not finite.all():
            raise DataError(
                f"expected finite float32 numbers in 'x' of {path}, but row {finite.argmin()} has NaN or infinity"
            )
    return np.ascontiguousarray(x)


def read_torchvision(name: str, kind: str, where: Path) -> Raw:
    """Read a set in torchvision's layout; download it first if it isn't there.

    Raises:
        DataError: It is neither there nor can it be downloaded, or its files are damaged.
    """
    try:
        parts = _torchvision_parts(kind, where, download=False)
    except Exception:  # torchvision raises whatever a missing or half-written file leads to
        parts = _download(name, kind, where)
    (x, y), (test_x, test_y) = parts
    both_x, both_y = np.ascontiguousarray(np.concatenate([x, test_x])), np.concatenate([y, test_y])
    return Raw(both_x, both_y, len(x), int(both_y.max(initial=-1)) + 1)


def has_torchvision(kind: str, where: Path) -> bool:
    """Return whether a folder holds a whole set in torchvision's layout; reads it, since only that tells."""
    try:
        _torchvision_parts(kind, where, download=False)
    except Exception:  # as in read_torchvision
        return False
    return True


Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def _download(name: str, kind: str, where: Path) -> tuple[Part, Part]:
    advice = (
        f"put torchvision's files of {kind} there (on a machine with a network:"
        f" python -c \"from fedstrat.data.sources import load; load('{name}', '.')\" writes them to the"
        " current folder), or set dataset.dir to a folder that has them, in torchvision's layout or as"
        " train.npz and test.npz"
    )
    try:
        where.mkdir(parents=True, exist_ok=True)
        # One process of this machine downloads; those that waited find the files and read them.
        with locked(where / ".download.lock"), _socket_timeout(DOWNLOAD_TIMEOUT_SECONDS):
            logger.warning("Data set '%s' isn't complete in %s: downloading it", name, where)
            return _torchvision_parts(kind, where, download=True)
    except Exception as error:
        raise DataError(
            f"the data set '{name}' is expected in {where}, but it isn't there, or is damaged, and couldn't"
            f" be downloaded ({_first_line(error)}); {advice}"
        ) from error


def _torchvision_parts(kind: str, where: Path, *, download: bool) -> tuple[Part, Part]:
    from torchvision import datasets  # noqa: PLC0415  # imports torch: only for the sets that need it

    arguments: dict[str, Any] = {"split": "byclass"} if kind == "EMNIST" else {}
    parts: list[Part] = []
    for train in (True, False):
        with warnings.catch_warnings():
            # CIFAR's files were pickled by Python 2; NumPy 2.4.0 to 2.4.4 warn of how they spell a dtype.
            warnings.simplefilter("ignore", np.exceptions.VisibleDeprecationWarning)
            part = getattr(datasets, kind)(where, train=train, download=download, **arguments)
        x = np.asarray(part.data, dtype=np.uint8)
        if kind == "EMNIST":
            x = x.transpose(0, 2, 1)  # its files hold the pictures transposed
        x = x[:, np.newaxis] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
        parts.append((x, np.asarray(part.targets, dtype=np.int64)))
    return parts[0], parts[1]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file against the other processes of this machine."""
    with path.open("w") as lock:
        if sys.platform != "win32":
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    # A silent firewall would otherwise hold torchvision's download for ever.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return " ".join(text.split())[:200]
