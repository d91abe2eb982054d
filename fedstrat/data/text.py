"""Texts as word ids: rows of a ``csv`` file -> integers of one length.

A word is a run of letters, digits or underscores of the text in lower case. A text is its first ``max_length`` words;
shorter ones are padded behind. Id 0 is padding, 1 an unknown word. Which id a word has must be the same on all nodes,
though no node sees another's texts; there are three rules:

* ``hashed`` (the default): 2 + crc32(word) mod (vocab_size - 2). Nothing is counted or exchanged; words that share an
  id can't be told apart.
* ``frequent``: the vocab_size - 2 most frequent words of the train part, the most frequent first, equal ones in
  alphabetic order. For a data set that all clients share, in simulation; refused for a node's private folder, whose
  counts are its own.
* ``file``: the words of ``vocabulary.txt`` in the data set's folder, one a line, the first with id 2. All nodes need
  the same file.
"""

import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from fedstrat.data.files import Raw, class_index, read_classes
from fedstrat.errors import DataError

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
VOCABULARIES = ("hashed", "frequent", "file")
VOCABULARY_FILE = "vocabulary.txt"

_WORD = re.compile(r"\w+")
_LONGEST_FIELD = 2**24  # characters; the csv module's own limit is 128 thousand


class Coding(NamedTuple):
    """How texts become ids.

    Attributes:
        vocabulary: One of :data:`VOCABULARIES`.
        vocab_size: V, the number of ids, padding and unknown word included; at least 3.
        max_length: Words of a text that count, at least 1.
    """

    vocabulary: str = "hashed"
    vocab_size: int = 10_000
    max_length: int = 64


class _Rows(NamedTuple):
    labels: list[str]
    texts: list[str]
    first: int  # the smallest number that a label can be


def words(text: str) -> list[str]:
    """Split a text into its words, in lower case."""
    return _WORD.findall(text.lower())


def hashed(word: str, vocab_size: int) -> int:
    """Return the id of a word by its CRC-32, the same on every machine, in [2, vocab_size)."""
    return FIRST_WORD + zlib.crc32(word.encode()) % (vocab_size - FIRST_WORD)


def frequent(texts: Iterable[str], vocab_size: int) -> dict[str, int]:
    """Number the vocab_size - 2 most frequent words from 2 up; equal counts go by the alphabet."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {word: FIRST_WORD + rank for rank, (word, _) in enumerate(ranked[: vocab_size - FIRST_WORD])}


def encode(texts: Sequence[str], find: Callable[[str], int], max_length: int) -> NDArray[np.int32]:
    """Turn texts into ids, shape (n, max_length), int32, padded with 0 behind.

    Args:
        texts: n texts.
        find: Word -> id.
        max_length: Words of a text that count.
    """
    ids = np.zeros((len(texts), max_length), dtype=np.int32)
    for row, text in zip(ids, texts, strict=True):
        found = [find(word) for word in words(text)[:max_length]]
        row[: len(found)] = found
    return ids


def read_csv(where: Path, coding: Coding) -> Raw:
    """Read ``train.csv`` and, where there is one, ``test.csv``; each may be gzipped, as ``train.csv.gz``.

    Rows are ``label,text`` with labels from 0, or ``class,title,text`` with classes from 1, as DBpedia-14, AG News and
    their relatives have them; all fields behind the first are joined. A first row that begins with ``label`` or
    ``class`` is a header, and says by that word whether numbers go from 0 or from 1. Labels that aren't numbers are
    names: their index is that in ``classes.txt`` (a name a line) or, without it, in their sorted list.

    Raises:
        DataError: A file is missing or damaged, a row or a label isn't as above, or ``vocabulary.txt`` is missing.
    """
    train = _find(where, "train")
    if train is None:
        found = sorted(path.name for path in where.iterdir())[:5] if where.is_dir() else None
        state = "there is no such folder" if found is None else f"it holds {', '.join(found) or 'nothing'}"
        raise DataError(
            f"expected train.csv or train.csv.gz (label, text) in {where}, but {state}; set dataset.dir to the folder"
            " that has it (an absolute path: apps run in another working directory)"
        )
    rows = _read_rows(train)
    num_train = len(rows.labels)
    test = _find(where, "test")
    if test is not None:
        more = _read_rows(test)
        if more.first != rows.first and more.labels:
            raise DataError(f"expected {test} to have the columns of {train.name}, but its labels begin elsewhere")
        rows = _Rows(rows.labels + more.labels, rows.texts + more.texts, rows.first)
    y, num_classes = _classes(rows, where)
    x = encode(rows.texts, _finder(rows.texts[:num_train], where, coding), coding.max_length)
    return Raw(x, y, num_train, num_classes, vocab_size=coding.vocab_size)


def files(where: Path) -> tuple[Path, ...]:
    """Return the files of a csv folder that are there."""
    found = [_find(where, "train"), _find(where, "test"), where / VOCABULARY_FILE, where / "classes.txt"]
    return tuple(path for path in found if path is not None and path.is_file())


def _find(where: Path, part: str) -> Path | None:
    return next((path for path in (where / f"{part}.csv", where / f"{part}.csv.gz") if path.is_file()), None)


def _read_rows(path: Path) -> _Rows:
    labels, texts = [], []
    first: int | None = None
    number = 0
    try:
        for number, row in _lines(path):
            if first is None:
                heading = row[0].strip().lower()
                first = 1 if heading == "class" or (heading != "label" and len(row) > 2) else 0
                if heading in ("label", "class"):
                    continue
            if len(row) < 2:
                raise DataError(f"{path}, line {number}: expected a label and a text, but got {len(row)} field(s)")
            labels.append(row[0].strip())
            texts.append(" ".join(row[1:]))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{path} can't be read as comma-separated UTF-8 text behind line {number}:"
            f" {' '.join(str(error).split())[:200]}; expected rows of a label and a text, in quotes where it holds"
            " commas"
        ) from error
    return _Rows(labels, texts, first or 0)


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and fields of every row that isn't empty."""
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        with _open(path) as stream:
            reader = csv.reader(stream, strict=True)
            for row in reader:
                if row:
                    yield reader.line_num, row
    finally:
        csv.field_size_limit(before)


def _open(path: Path) -> TextIO:
    # A byte order mark, as Excel writes it, is no part of the first field.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _classes(rows: _Rows, where: Path) -> tuple[NDArray[np.int64], int]:
    named = read_classes(where)
    if all(label.isascii() and label.isdecimal() for label in rows.labels):
        y = np.array([int(label) for label in rows.labels], dtype=np.int64) - rows.first
        if y.min(initial=0) < 0:
            raise DataError(
                f"expected classes from 1 up in {where}, whose rows have three fields or the header 'class', but got"
                " 0; give the rows a header 'label,…' if they go from 0"
            )
        num_classes = len(named) if named else int(y.max(initial=-1)) + 1
        if y.max(initial=-1) >= num_classes:
            raise DataError(f"{where / 'classes.txt'} names {num_classes} classes, but there is a label {y.max()}")
        return y, num_classes
    distinct = sorted(set(rows.labels))
    numbers = [label for label in distinct if label.isdecimal()]
    if numbers and not named:
        odd = next(label for label in distinct if label not in numbers)
        raise DataError(
            f"expected the labels in {where} to be whole numbers or names, but got both, {numbers[0]!r} and {odd!r}; if"
            " all are names, list them in classes.txt, a name a line"
        )
    index = class_index(named or distinct)
    strange = [label for label in distinct if label not in index]
    if strange:
        raise DataError(f"expected the labels in {where} to be lines of its classes.txt, but got {strange[0]!r}")
    return np.array([index[label] for label in rows.labels], dtype=np.int64), len(index)


def _finder(train_texts: Sequence[str], where: Path, coding: Coding) -> Callable[[str], int]:
    if coding.vocabulary == "hashed":
        cache: dict[str, int] = {}

        def find(word: str) -> int:
            number = cache.get(word)
            if number is None:
                number = cache[word] = hashed(word, coding.vocab_size)
            return number

        return find
    known = (
        frequent(train_texts, coding.vocab_size)
        if coding.vocabulary == "frequent"
        else _read_vocabulary(where / VOCABULARY_FILE, coding.vocab_size)
    )
    return lambda word: known.get(word, UNKNOWN)


def _read_vocabulary(path: Path, vocab_size: int) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="utf-8").split()
    except FileNotFoundError:
        raise DataError(
            f"dataset.vocabulary 'file' reads {path}, a word a line and the same file on every node, but it doesn't"
            " exist; put it there, or set dataset.vocabulary to 'hashed', which needs none"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as UTF-8 text, a word a line: {error}") from error
    known = {word: FIRST_WORD + place for place, word in enumerate(dict.fromkeys(word.lower() for word in lines))}
    if len(known) + FIRST_WORD > vocab_size:
        raise DataError(
            f"{path} holds {len(known)} words, but dataset.vocab-size {vocab_size} has room for"
            f" {vocab_size - FIRST_WORD}; raise it on the server, to {len(known) + FIRST_WORD} or more"
        )
    return known
