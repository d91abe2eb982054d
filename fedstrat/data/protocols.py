"""Partitions with their test parts, and the published protocols by name: pure, seeded, index lists only.

The schemes of :mod:`fedstrat.data.partition` share all samples out; every client then splits its own at random into
train and test (``dataset.test-fraction``). Beside them:

* ``natural``: a client is one of the data set's own groups, for example a writer of FEMNIST. N groups are drawn at
  random among those with at least ``min_size`` samples, and one at least; the samples of other groups belong to nobody.
* ``craft`` (CRAFT, section on experiments): ``dirichlet`` with at least 20 samples a client; a set that knows its
  groups goes by ``natural`` instead, among groups of at most 500 samples. 80 % train, 20 % test.
* ``fedvssam-dirichlet``, ``fedvssam-pathological`` (FedVSSAM, by the simulators that it builds on): every client gets
  floor(n / N) of the n samples of the official train part. Client i draws each from its own class prior: Dirichlet
  (alpha, ..., alpha) over the classes, or ``classes_per_client`` random classes with equal mass; within a class samples
  are taken in a random order, and a class that runs out starts again. So **samples repeat**, also on one client, and
  others stay unused. The test part is the official one, shared out evenly at random: the mean over the clients is the
  accuracy on it. A data set without one gives ``test_fraction`` of all its samples, drawn at random, for it.
* ``fedcspack`` (FedCSPACK, by its authors' generator): class by class, shares ~ Dirichlet(alpha, ..., alpha) over the
  clients, of which those that hold n / N samples or more get none; drawn again until everybody has one sample and at
  least min(64, n / (2 N)), rounded down, which is min(batch size 16 / 0.25, n / (2 N)). 75 % train, 25 % test.
* ``fedspu`` (FedSPU): ``dirichlet`` with 70 % train, 30 % test.

The numbers of clients, alpha and classes per client of the papers are settings of a run: the protocols keep the rule.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedstrat.data.partition import (
    PARTITIONS,
    Indices,
    check_alpha,
    check_request,
    cut,
    partition,
    split,
)
from fedstrat.errors import DataError, nearest
from fedstrat.seeding import derive, rng

PROTOCOLS = ("natural", "craft", "fedvssam-dirichlet", "fedvssam-pathological", "fedcspack", "fedspu")
SCHEMES = (*PARTITIONS, *PROTOCOLS)

CRAFT_LARGEST_GROUP = 500
FEDCSPACK_SMALLEST = 64
FEDCSPACK_DRAWS = 1000
"""Draws after which it is clear enough that nobody can have so many samples by chance."""

FIXED: Mapping[str, Mapping[str, int | float]] = {
    "craft": {"min_size": 20, "test_fraction": 0.2},
    "fedvssam-dirichlet": {"min_size": 0},
    "fedvssam-pathological": {"min_size": 0},
    "fedcspack": {"min_size": 0, "test_fraction": 0.25},
    "fedspu": {"test_fraction": 0.3},
}
"""Settings that a protocol decides itself, whatever it is given."""


class Share(NamedTuple):
    """What one client holds: ascending int64 indices of its train, its test and its validation samples."""

    train: Indices
    test: Indices
    validation: Indices = np.empty(0, np.int64)


def share_out(
    labels: ArrayLike,
    num_clients: int,
    scheme: str,
    *,
    alpha: float = 0.1,
    classes_per_client: int = 2,
    min_size: int = 0,
    test_fraction: float = 0.2,
    seed: int = 0,
    num_train: int | None = None,
    groups: ArrayLike | None = None,
) -> list[Share]:
    """Share samples out over clients, train and test.

    Args:
        labels: Class of each sample, shape (n,), integers.
        num_clients: N, at least 1.
        scheme: One of :data:`SCHEMES`.
        alpha: Concentration of the Dirichlet draws, > 0.
        classes_per_client: Classes of each client, for the pathological schemes.
        min_size: Fewest samples that a client may hold.
        test_fraction: Share of a client's samples that are its test part, in [0, 1).
        seed: The run's seed. The same arguments give the same shares on every machine.
        num_train: How many samples, from the first, are the official train part; None: all.
        groups: Who each sample comes from, shape (n,), integers; None if that isn't known.

    Returns:
        One share per client; train and test have no sample in common.

    Raises:
        DataError: The shares can't exist, or the scheme is unknown.
    """
    if scheme not in SCHEMES:
        raise DataError(f"unknown partition '{scheme}'{nearest(scheme, SCHEMES)} There are: {', '.join(SCHEMES)}")
    labels = np.asarray(labels)
    fixed: Mapping[str, int | float] = FIXED.get(scheme, {})
    min_size, test_fraction = int(fixed.get("min_size", min_size)), fixed.get("test_fraction", test_fraction)
    check_request(labels, num_clients, min_size)
    generator = rng(seed, "partition", scheme)
    if scheme.startswith("fedvssam-"):
        train, test = _official(len(labels), len(labels) if num_train is None else num_train, test_fraction, generator)
        priors = _priors(labels[train], num_clients, scheme, alpha, classes_per_client, generator)
        return _recycled(labels, train, test, priors, generator)
    if scheme == "natural" or (scheme == "craft" and groups is not None):
        largest = CRAFT_LARGEST_GROUP if scheme == "craft" else len(labels)
        smallest = 0 if scheme == "craft" else min_size  # a writer is taken as it is
        parts = _natural(groups, num_clients, smallest, largest, generator)
    elif scheme == "fedcspack":
        parts = _capped(labels, num_clients, alpha, generator)
    else:
        rule = "dirichlet" if scheme in ("craft", "fedspu") else scheme
        parts = partition(
            labels,
            num_clients,
            rule,
            alpha=alpha,
            classes_per_client=classes_per_client,
            min_size=min_size,
            seed=seed,
        )
    return [Share(*split(part, test_fraction, derive(seed, "split", i))) for i, part in enumerate(parts)]


def _natural(
    groups: ArrayLike | None, num_clients: int, smallest: int, largest: int, generator: np.random.Generator
) -> list[Indices]:
    if groups is None:
        raise DataError(
            "partition 'natural' needs data that say who each sample comes from, but this data set doesn't; use"
            " dataset.name 'femnist', an npz folder whose files hold 'group', or another dataset.partition"
        )
    _, group_of, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    able = np.flatnonzero((sizes >= max(smallest, 1)) & (sizes <= largest))
    if len(able) < num_clients:
        raise DataError(
            f"{num_clients} clients need as many groups of {max(smallest, 1)} to {largest} samples, but of the"
            f" {len(sizes)} groups of the data set {len(able)} are such; use at most {len(able)} clients"
        )
    chosen = generator.choice(able, num_clients, replace=False)
    order = np.argsort(group_of, kind="stable").astype(np.int64)
    members = np.split(order, np.cumsum(sizes)[:-1])
    return [members[group] for group in chosen]


def _official(
    num_samples: int, num_train: int, test_fraction: float, generator: np.random.Generator
) -> tuple[Indices, Indices]:
    """Return the official parts; without a test part a random one is held back."""
    if num_train < num_samples:
        return np.arange(num_train), np.arange(num_train, num_samples)
    return split(np.arange(num_samples), test_fraction, int(generator.integers(2**32)))


def _priors(
    labels: NDArray[np.generic],
    num_clients: int,
    scheme: str,
    alpha: float,
    per_client: int,
    generator: np.random.Generator,
) -> NDArray[np.float64]:
    """Return the probability of each class at each client, shape (N, K)."""
    num_classes = len(np.unique(labels))
    if scheme == "fedvssam-dirichlet":
        check_alpha(alpha)
        return generator.dirichlet(np.full(num_classes, float(alpha)), size=num_clients)
    if not 1 <= per_client <= num_classes:
        raise DataError(
            f"partition '{scheme}': expected dataset.classes-per-client from 1 to {num_classes}, the number of classes,"
            f" but got {per_client}"
        )
    rows = np.tile(np.arange(num_classes) < per_client, (num_clients, 1))
    return generator.permuted(rows, axis=1) / per_client


def _recycled(
    labels: NDArray[np.generic],
    train: Indices,
    test: Indices,
    priors: NDArray[np.float64],
    generator: np.random.Generator,
) -> list[Share]:
    num_clients = len(priors)
    size = len(train) // num_clients
    if size < 1:
        raise DataError(
            f"{num_clients} clients need a sample each, but the train part has {len(train)}; use at most"
            f" {len(train)} clients"
        )
    # The clients take turns at random, a class drawn from the prior of the one whose turn it is.
    owner = generator.permutation(np.repeat(np.arange(num_clients), size))
    cumulated = np.cumsum(priors, axis=1)
    draws = generator.random(len(owner))[:, np.newaxis] * cumulated[owner, -1:]
    drawn = (draws >= cumulated[owner]).sum(axis=1)
    taken = np.empty(len(owner), dtype=np.int64)
    for place, label in enumerate(np.unique(labels[train])):
        turns = np.flatnonzero(drawn == place)
        pool = generator.permutation(train[labels[train] == label])
        taken[turns] = np.resize(pool, len(turns))  # from the beginning again when it runs out
    shuffled = generator.permutation(test)
    return [
        Share(np.sort(taken[owner == client]), np.sort(shuffled[client::num_clients])) for client in range(num_clients)
    ]


def _capped(
    labels: NDArray[np.generic], num_clients: int, alpha: float, generator: np.random.Generator
) -> list[Indices]:
    check_alpha(alpha)
    fair = len(labels) / num_clients
    smallest = max(int(min(FEDCSPACK_SMALLEST, fair / 2)), 1)
    classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(FEDCSPACK_DRAWS):
        owner = np.empty(len(labels), dtype=np.int64)
        sizes = np.zeros(num_clients, dtype=np.int64)
        for samples in classes:
            shares = generator.dirichlet(np.full(num_clients, float(alpha))) * (sizes < fair)
            if shares.sum() == 0:  # all of the mass is with clients that are full
                break
            counts = cut(shares / shares.sum(), len(samples))
            owner[generator.permutation(samples)] = np.repeat(np.arange(num_clients), counts)
            sizes += counts
        else:
            if sizes.min() >= smallest:
                order = np.argsort(owner, kind="stable").astype(np.int64)
                return np.split(order, np.cumsum(sizes)[:-1])
    raise DataError(
        f"partition 'fedcspack' over {num_clients} clients with dataset.alpha {alpha:g} found no draw of"
        f" {FEDCSPACK_DRAWS} that leaves everybody at least {smallest} sample{'s' * (smallest > 1)}; use"
        " fewer clients or a larger dataset.alpha"
    )
