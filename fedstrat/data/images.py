"""Folders of pictures, a class per sub-folder -> arrays."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrat.data.files import Raw, class_index, read_classes
from fedstrat.errors import DataError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm")
_GREY = ("1", "L", "LA", "I;16")


def read_images(where: Path, size: int = 0) -> Raw:
    """Read ``train/<class>/*`` and, where there is one, ``test/<class>/*``; without ``train``, ``<class>/*``.

    The index of a class is its place in ``classes.txt`` (a name a line), else in the sorted names of all sub-folders.
    All nodes must have the same index: a node that lacks a class has an empty folder for it, or the same
    ``classes.txt`` as all others.

    Args:
        where: The folder.
        size: Side in pixels that every picture is brought to, as a square; 0 keeps them, then all must be of one size.

    Returns:
        uint8 pixels, channels first: 1 channel if every picture is grey, else 3.

    Raises:
        DataError: There are no pictures, or one can't be read or has another size than the first.
    """
    train, test = (where / "train", where / "test") if (where / "train").is_dir() else (where, None)
    folders = [folder for folder in (train, test) if folder is not None and folder.is_dir()]
    found = sorted({path.name for folder in folders for path in folder.iterdir() if path.is_dir()})
    named = read_classes(where)
    index = class_index(named or found)
    strange = [name for name in found if name not in index]
    if strange:
        raise DataError(f"expected the sub-folders of {where} to be lines of its classes.txt, but got {strange[0]!r}")
    chosen = [
        (path, index[name])
        for folder in folders
        for name in index
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in PICTURES
    ]
    if not chosen:
        raise DataError(
            f"expected pictures ({', '.join(PICTURES)}) in a sub-folder per class of {where}/train or {where}, but"
            f" there are none; set dataset.dir to the folder that has them (an absolute path: apps run in another"
            " working directory)"
        )
    num_train = sum(path.is_relative_to(train) for path, _ in chosen)
    pictures = [_open(path, size) for path, _ in chosen]
    channels = 1 if all(array.ndim == 2 for array in pictures) else 3
    shape = pictures[0].shape[:2]
    x = np.empty((len(pictures), channels, *shape), dtype=np.uint8)
    for place, ((path, _), array) in enumerate(zip(chosen, pictures, strict=True)):
        if array.shape[:2] != shape:
            raise DataError(
                f"expected pictures of one size, {shape[1]} x {shape[0]} as {chosen[0][0]}, but {path} has"
                f" {array.shape[1]} x {array.shape[0]}; set dataset.image-size to a side in pixels that all are"
                " brought to"
            )
        x[place] = array if array.ndim == 2 else array.transpose(2, 0, 1)
    return Raw(x, np.array([label for _, label in chosen], dtype=np.int64), num_train, len(index))


def files(where: Path) -> tuple[Path, ...]:
    """Return the folders whose times change when a picture comes or goes, and ``classes.txt``."""
    folders = [where / "train", where / "test"] if (where / "train").is_dir() else [where]
    outer = [folder for folder in folders if folder.is_dir()]
    inner = [path for folder in outer for path in sorted(folder.iterdir()) if path.is_dir()]
    return tuple(path for path in (*outer, *inner, where / "classes.txt") if path.exists())


def _open(path: Path, size: int) -> NDArray[np.uint8]:
    """Read one picture: (height, width) if it is grey, else (height, width, 3)."""
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415  # comes with torchvision

    try:
        with Image.open(path) as opened:
            picture = opened.convert("L" if opened.mode in _GREY else "RGB")
            if size:
                picture = picture.resize((size, size), Image.Resampling.BILINEAR)
            array: NDArray[Any] = np.asarray(picture, dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} can't be read as a picture: {' '.join(str(error).split())[:200]}") from error
    return array
