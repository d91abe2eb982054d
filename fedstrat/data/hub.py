"""Sets of the Hugging Face hub, fetched once and written as local files.

FEMNIST becomes ``train.npz`` with the writer of each sample as ``group``, DBpedia-14 ``train.csv.gz`` and
``test.csv.gz`` in their original columns. From then on neither the package ``datasets`` nor a network is needed, so
the folder can be copied to machines that have neither. ``datasets`` comes with the extra ``fedstrat[hub]``.
"""

import csv
import gzip
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedstrat.data.files import locked
from fedstrat.errors import DataError

logger = logging.getLogger(__name__)


def fetch(name: str, kind: str, where: Path) -> None:
    """Fetch a set into a folder.

    Args:
        name: ``femnist`` or ``dbpedia14``.
        kind: Its name on the hub.
        where: The folder; it is made at need.

    Raises:
        DataError: ``datasets`` isn't installed, the hub can't be reached, or the set isn't what it is known to be.
    """
    expected = "train.npz" if name == "femnist" else "train.csv"
    advice = (
        f"on a machine with a network: pip install 'fedstrat[hub]', then python -c \"from fedstrat.data.sources import"
        f" load; load('{name}', '.')\" writes its files to the current folder; copy these and set dataset.dir to where"
        " they are"
    )
    try:
        import datasets  # noqa: PLC0415  # an optional extra
    except ImportError:
        raise DataError(
            f"the data set '{name}' is expected as {expected} in {where}, but it isn't there, and the package"
            f" 'datasets' that could fetch it isn't installed: {advice}"
        ) from None
    try:
        where.mkdir(parents=True, exist_ok=True)
        with locked(where / ".download.lock"):
            if any((where / file).is_file() for file in ("train.npz", "train.csv", "train.csv.gz")):
                return  # another process of this machine has been faster
            logger.warning("Data set '%s' isn't in %s: fetching %s", name, where, kind)
            _WRITERS[name](datasets.load_dataset, kind, where)
    except Exception as error:
        raise DataError(
            f"the data set '{name}' is expected as {expected} in {where}, but it isn't there and couldn't be fetched"
            f" ({type(error).__name__}: {' '.join(str(error).split())[:200]}); {advice}"
        ) from error


def _write_femnist(load_dataset: Callable[..., Any], kind: str, where: Path) -> None:
    rows = load_dataset(kind, split="train")
    x = np.empty((len(rows), 28, 28), dtype=np.uint8)
    y = np.empty(len(rows), dtype=np.int64)
    names = []
    for place, row in enumerate(rows):
        x[place] = np.asarray(row["image"], dtype=np.uint8)
        y[place] = row["character"]
        names.append(str(row["writer_id"]))
    _, group = np.unique(np.array(names), return_inverse=True)
    temporary = where / ".train.npz"
    with temporary.open("wb") as stream:
        np.savez(stream, x=x, y=y, group=group.astype(np.int64), num_classes=62)
    temporary.replace(where / "train.npz")


def _write_dbpedia14(load_dataset: Callable[..., Any], kind: str, where: Path) -> None:
    for part in ("test", "train"):  # train last: it tells that the set is complete
        temporary = where / f".{part}.csv.gz"
        with gzip.open(temporary, "wt", encoding="utf-8", newline="", compresslevel=6) as stream:
            writer = csv.writer(stream)
            for row in load_dataset(kind, split=part):
                writer.writerow([int(row["label"]) + 1, row["title"], row["content"]])
        temporary.replace(where / f"{part}.csv.gz")


_WRITERS = {"femnist": _write_femnist, "dbpedia14": _write_dbpedia14}
