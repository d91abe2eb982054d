"""Which samples belong to a client: run config and node config -> indices. No tensor in sight.

Two kinds of client:

* A node whose node config has ``dataset.dir`` loads that private folder, whole. ``dataset.name`` in the node
  config says what it holds (default: the run config's, if that is ``npz``, ``csv`` or ``images``, else ``npz``). Its
  official test part is its test part; without one, ``dataset.test-fraction`` of its samples are.
* Every other node takes part ``partition-id`` of the run config's data set, shared out over ``num-clients``
  clients (0: over ``num-partitions`` of the node config) as :mod:`fedstrat.data.protocols` says.

Of its train part ``dataset.validation-fraction`` (0: nothing) is held back: never trained on, and only evaluated
after the last round. Partition and splits depend on the run config's ``seed`` alone.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

import numpy as np

from fedstrat.data import sources
from fedstrat.data.partition import Indices, split
from fedstrat.data.protocols import Share, share_out
from fedstrat.data.text import Coding
from fedstrat.errors import ConfigError, DataError
from fedstrat.seeding import derive, rng

T = TypeVar("T", int, float, str)

MOST_ELSEWHERE = 2000
"""How many samples of other clients a personal model is tried on: enough for half a percent, cheap for 1000 clients."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """One client's samples: indices of its train, its validation and its test part into a source."""

    source: sources.Source
    train: Indices
    test: Indices
    validation: Indices = field(default_factory=lambda: np.empty(0, np.int64))


def assign(run_config: Mapping[str, object], node_config: Mapping[str, object]) -> Assignment:
    """Find a client's samples.

    Args:
        run_config: Flat, kebab-case: reads ``seed``, ``num-clients`` and ``dataset.*``.
        node_config: Reads ``dataset.dir`` and ``dataset.name``, or ``partition-id`` and ``num-partitions``.

    Raises:
        ConfigError: A key of the run config is missing or has another type.
        DataError: The data can't be read, the partition can't exist, or the node config doesn't say which
            part this client holds.
    """
    fraction = setting(run_config, "dataset.test-fraction", float)
    seed = setting(run_config, "seed", int)
    if private := _private_folder(run_config, node_config):
        name, directory = private
        reading = _reading(run_config, name)
        if name in sources.TEXTS and reading.coding.vocabulary == "frequent":
            raise DataError(
                f"dataset.vocabulary 'frequent' counts the words of data that all clients share, but {directory} is"
                " this node's own, and others would number the words otherwise; set it to 'hashed', or to 'file' and"
                " put the same vocabulary.txt into every node's folder"
            )
        source = sources.load(name, directory, reading)
        if source.num_train < len(source.y):
            share = Share(np.arange(source.num_train), np.arange(source.num_train, len(source.y)))
        else:
            share = Share(*split(np.arange(len(source.y)), fraction, derive(seed, "split")))
        return Assignment(source, *_hold_back(share, run_config, derive(seed, "validation")))
    name = _node_text(node_config, "dataset.name") or setting(run_config, "dataset.name", str)
    index, num_clients = _position(run_config, node_config)
    source = _load(run_config, name)
    share = _shares(run_config, source, num_clients)[index]
    return Assignment(source, *_hold_back(share, run_config, derive(seed, "validation", index)))


def others(run_config: Mapping[str, object], node_config: Mapping[str, object]) -> Assignment | None:
    """Find test samples of the other clients of a simulation, for seeing how a personal model does on their data.

    Args:
        run_config: As in :func:`assign`.
        node_config: As in :func:`assign`.

    Returns:
        At most ``MOST_ELSEWHERE`` samples of all other clients' test parts together, drawn by the seed and this
        client's place, as the test part; None for a node with private data, which has nobody else's.
    """
    if _private_folder(run_config, node_config):
        return None
    seed = setting(run_config, "seed", int)
    name = _node_text(node_config, "dataset.name") or setting(run_config, "dataset.name", str)
    index, num_clients = _position(run_config, node_config)
    source = _load(run_config, name)
    tests = [share.test for i, share in enumerate(_shares(run_config, source, num_clients)) if i != index]
    every = np.concatenate([np.empty(0, np.int64), *tests])
    if len(every) > MOST_ELSEWHERE:
        every = np.sort(rng(seed, "elsewhere", index).choice(every, MOST_ELSEWHERE, replace=False))
    return Assignment(source, every[:0], every)


def num_examples(run_config: Mapping[str, object], node_config: Mapping[str, object]) -> int:
    """Return how many examples a client trains on; imports no torch for ``digits`` and ``npz``.

    Raises:
        ConfigError: As :func:`assign`.
        DataError: As :func:`assign`.
    """
    return len(assign(run_config, node_config).train)


def shared(run_config: Mapping[str, object]) -> tuple[sources.Source, tuple[Share, ...]]:
    """Return the data set of a simulation and what each of its ``num-clients`` clients holds of it, as :func:`assign`.

    Raises:
        ConfigError: As :func:`assign`.
        DataError: As :func:`assign`.
    """
    source = _load(run_config, setting(run_config, "dataset.name", str))
    seed = setting(run_config, "seed", int)
    shares = enumerate(_shares(run_config, source, setting(run_config, "num-clients", int)))
    return source, tuple(_hold_back(share, run_config, derive(seed, "validation", index)) for index, share in shares)


def describe(
    run_config: Mapping[str, object], node_config: Mapping[str, object] | None = None
) -> tuple[tuple[int, ...], int]:
    """Return the shape of one input and the number of classes, what a model is built from.

    For the named sets nothing is read: the server of a deployment has no data. ``npz``, ``csv`` and ``images`` are
    read from the ``dataset.dir`` of the node config, else of the run config.

    Raises:
        ConfigError: As :func:`assign`.
        DataError: The name is unknown, or it is one of these three and this process has no folder to look into.
    """
    name = setting(run_config, "dataset.name", str)
    if name in sources.NAMED:
        known = sources.NAMED[name]
        shape = (setting(run_config, "dataset.max-length", int),) if name in sources.TEXTS else known.input_shape
        return shape, known.num_classes
    directory = setting(run_config, "dataset.dir", str)
    if name in sources.OWN:
        directory = _node_text(node_config or {}, "dataset.dir") or directory
        if not directory or not sources.folder(name, directory).is_dir():
            enough = {
                "npz": "a train.npz like the clients' (one row of x and y and num_classes will do)",
                "csv": "a train.csv like the clients' (one row, and classes.txt with all classes, will do)",
                "images": "sub-folders like the clients' (one picture, and classes.txt with all classes, will do)",
            }[name]
            raise DataError(
                f"the model's input shape and number of classes come from the data set '{name}', but dataset.dir"
                f" is {repr(directory) if directory else 'empty'}, no folder that this process can see; set"
                f" dataset.dir to a folder with {enough}, or model.name to a factory of your own,"
                " my_package.module:Factory"
            )
    source = sources.load(name, directory, _reading(run_config, name))
    return source.input_shape, source.num_classes


def vocab_size(run_config: Mapping[str, object]) -> int:
    """Return the number of word ids of a data set of texts, 0 for any other; nothing is read.

    Raises:
        ConfigError: As :func:`assign`.
    """
    is_text = setting(run_config, "dataset.name", str) in sources.TEXTS
    return setting(run_config, "dataset.vocab-size", int) if is_text else 0


def setting(run_config: Mapping[str, object], key: str, kind: type[T]) -> T:
    """Read one key of a flat run config; an integer serves where a float is expected.

    Raises:
        ConfigError: It isn't there or has another type.
    """
    value = run_config.get(key)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        came = f"got {value!r}" if key in run_config else "it isn't there"
        raise ConfigError(f"expected '{key}' of the run config to be {kind.__name__}, but {came}")
    return value


def _hold_back(own: Share, run_config: Mapping[str, object], seed: int) -> Share:
    fraction = run_config.get("dataset.validation-fraction", 0.0)
    if not isinstance(fraction, int | float) or not fraction:
        return own
    kept, validation = split(np.unique(own.train), float(fraction), seed)
    # A sample that a client holds several times is held back with all of its copies.
    return own._replace(train=own.train[np.isin(own.train, kept)], validation=validation)


def _private_folder(run_config: Mapping[str, object], node_config: Mapping[str, object]) -> tuple[str, str] | None:
    directory = _node_text(node_config, "dataset.dir")
    if not directory:
        return None
    wanted = run_config.get("dataset.name")
    usual = wanted if isinstance(wanted, str) and wanted in sources.OWN else "npz"
    return _node_text(node_config, "dataset.name") or usual, directory


def _reading(run_config: Mapping[str, object], name: str) -> sources.Reading:
    """How the files of a set are read; asks for no key that the set doesn't need."""
    if name in sources.TEXTS:
        coding = Coding(
            setting(run_config, "dataset.vocabulary", str),
            setting(run_config, "dataset.vocab-size", int),
            setting(run_config, "dataset.max-length", int),
        )
        return sources.Reading(coding=coding)
    if name == "images":
        return sources.Reading(image_size=setting(run_config, "dataset.image-size", int))
    return sources.Reading()


def _load(run_config: Mapping[str, object], name: str) -> sources.Source:
    return sources.load(name, setting(run_config, "dataset.dir", str), _reading(run_config, name))


def _node_text(node_config: Mapping[str, object], key: str) -> str:
    value = node_config.get(key, "")
    if not isinstance(value, str):
        raise DataError(f"expected '{key}' of the node config to be text in quotes, but got {value!r}")
    return value


def _position(run_config: Mapping[str, object], node_config: Mapping[str, object]) -> tuple[int, int]:
    """Return this client's place in the partition and over how many clients it goes."""
    index, nodes = node_config.get("partition-id"), node_config.get("num-partitions")
    num_clients = setting(run_config, "num-clients", int) or nodes
    known = f"the node config holds {dict(node_config)}"
    advice = (
        "start the node with --node-config 'partition-id=0 num-partitions=3', ids from 0 up, or give it"
        " private data with --node-config 'dataset.dir=\"/path\"'"
    )
    for key, value in (("partition-id", index), ("num-partitions", num_clients)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise DataError(f"expected '{key}' in the node config, an integer from 0 up, but {known}; {advice}")
    index, num_clients = cast("int", index), cast("int", num_clients)
    if index >= num_clients:
        source = "num-clients of the run config" if run_config["num-clients"] else "num-partitions"
        raise DataError(
            f"'partition-id' {index} of the node config asks for a part beyond the last: the data goes out"
            f" over {num_clients} clients ({source}), ids 0 to {num_clients - 1}; {known}. Set num-clients"
            f" to the number of nodes, or {advice}"
        )
    return index, num_clients


class _Request(NamedTuple):
    """All that the shares depend on."""

    name: str
    directory: str
    reading: sources.Reading
    files: tuple[tuple[str, int, int], ...]  # so that files that changed are shared out anew
    num_clients: int
    scheme: str
    alpha: float
    classes_per_client: int
    min_size: int
    test_fraction: float
    seed: int


def _shares(run_config: Mapping[str, object], source: sources.Source, num_clients: int) -> tuple[Share, ...]:
    return _cached_shares(
        _Request(
            name=source.name,
            directory=setting(run_config, "dataset.dir", str),
            reading=_reading(run_config, source.name),
            files=source.files,
            num_clients=num_clients,
            scheme=setting(run_config, "dataset.partition", str),
            alpha=setting(run_config, "dataset.alpha", float),
            classes_per_client=setting(run_config, "dataset.classes-per-client", int),
            min_size=setting(run_config, "dataset.min-size", int),
            test_fraction=setting(run_config, "dataset.test-fraction", float),
            seed=setting(run_config, "seed", int),
        )
    )


@functools.lru_cache(maxsize=8)
def _cached_shares(request: _Request) -> tuple[Share, ...]:
    source = sources.load(request.name, request.directory, request.reading)
    shares = share_out(
        source.y,
        request.num_clients,
        request.scheme,
        alpha=request.alpha,
        classes_per_client=request.classes_per_client,
        min_size=request.min_size,
        test_fraction=request.test_fraction,
        seed=request.seed,
        num_train=source.num_train,
        groups=source.groups,
    )
    for share in shares:
        for part in share:
            part.setflags(write=False)
    return tuple(shares)
