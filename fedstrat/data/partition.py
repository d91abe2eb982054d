"""Partition of a labelled data set over clients: pure, seeded, index lists only.

Every scheme of :data:`PARTITIONS` gives each sample to exactly one client, so a partition is disjoint and
complete by construction.

* ``iid``: a random permutation cut into equal parts (sizes differ by at most one).
* ``dirichlet``: for each class k, shares over clients p_k ~ Dirichlet(alpha, ..., alpha) cut the shuffled
  samples of k; sizes come out unbalanced. Clients below ``min_size`` are then topped up, sample by sample,
  with random samples of the client that is largest at that moment (the protocol of CRAFT's experiments).
* ``pathological``: every client holds samples of exactly c of the K classes; a class has about N c / K
  owners, who share its samples equally. No top-up, which would bring further classes.
* ``quantity``: sizes ~ Dirichlet(alpha, ..., alpha), labels at random, topped up as above.
"""

import heapq
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedstrat.errors import DataError, nearest
from fedstrat.seeding import rng

PARTITIONS = ("iid", "dirichlet", "pathological", "quantity")

Indices = NDArray[np.int64]


def partition(
    labels: ArrayLike,
    num_clients: int,
    scheme: str,
    *,
    alpha: float = 0.1,
    classes_per_client: int = 2,
    min_size: int = 0,
    seed: int = 0,
) -> list[Indices]:
    """Share ``len(labels)`` samples out over ``num_clients`` clients.

    Args:
        labels: Class of each sample, shape (n,), integers.
        num_clients: N, the number of clients, at least 1.
        scheme: One of :data:`PARTITIONS`.
        alpha: Concentration of the Dirichlet distribution, > 0, for ``dirichlet`` and ``quantity``; smaller
            is more uneven.
        classes_per_client: c, the number of classes of each client, for ``pathological``.
        min_size: Fewest samples that a client may hold; 0 allows clients without any.
        seed: The run's seed. The same arguments give the same partition on every machine.

    Returns:
        One ascending int64 array of indices into ``labels`` per client.

    Raises:
        DataError: The partition can't exist, or the scheme is unknown.
    """
    labels = np.asarray(labels)
    if scheme not in PARTITIONS:
        raise DataError(f"unknown partition '{scheme}'{nearest(scheme, PARTITIONS)} There are: {', '.join(PARTITIONS)}")
    check_request(labels, num_clients, min_size)
    generator = rng(seed, "partition", scheme)
    if scheme == "iid":
        quotient, remainder = divmod(len(labels), num_clients)
        owner = _deal(quotient + (np.arange(num_clients) < remainder), generator)
    elif scheme == "pathological":
        owner = _pathological(labels, num_clients, classes_per_client, generator)
    else:
        check_alpha(alpha)
        concentration = np.full(num_clients, float(alpha))
        if scheme == "quantity":
            owner = _deal(cut(generator.dirichlet(concentration), len(labels)), generator)
        else:
            owner = np.empty(len(labels), dtype=np.int64)
            for label in np.unique(labels):
                samples = np.flatnonzero(labels == label)
                owner[samples] = _deal(cut(generator.dirichlet(concentration), len(samples)), generator)
        _top_up(owner, num_clients, min_size, generator)
    sizes = np.bincount(owner, minlength=num_clients)
    if sizes.min() < min_size:  # pathological alone
        raise DataError(
            f"partition 'pathological' over {num_clients} clients with {classes_per_client} classes each"
            f" leaves client {sizes.argmin()} with {sizes.min()} samples, but dataset.min-size asks for"
            f" {min_size}, and a top-up would bring it further classes; use fewer clients or a smaller"
            " dataset.min-size"
        )
    order = np.argsort(owner, kind="stable").astype(np.int64)
    return np.split(order, np.cumsum(sizes)[:-1])


def split(indices: Indices, test_fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Split one client's samples at random into train and test.

    The train part holds max(1, floor((1 - test_fraction) n)) of n samples; a client with one sample trains on
    it and has no test part, a client without samples has neither.

    Args:
        indices: The client's samples, shape (n,).
        test_fraction: Share of test samples, in [0, 1).
        seed: This client's own seed, derived from the run's.

    Returns:
        Train and test indices, disjoint, each ascending.

    Raises:
        DataError: ``test_fraction`` is outside [0, 1).
    """
    if not 0 <= test_fraction < 1:
        raise DataError(f"expected dataset.test-fraction to be at least 0 and below 1, but got {test_fraction}")
    indices = np.asarray(indices, dtype=np.int64)
    # The small term keeps (1 - 0.9) * 10 = 0.9999... at one sample.
    num_train = max(1, math.floor((1 - test_fraction) * len(indices) + 1e-9))
    shuffled = indices[rng(seed, "split").permutation(len(indices))]
    return np.sort(shuffled[:num_train]), np.sort(shuffled[num_train:])


def check_request(labels: NDArray[np.generic], num_clients: int, min_size: int) -> None:
    """Refuse labels that aren't integers, no clients, and more samples than there are."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"expected one integer label per sample, shape (n,), but got {labels.dtype} of shape {labels.shape}"
        )
    if num_clients < 1:
        raise DataError(f"expected at least 1 client to share the data out to, but got {num_clients}")
    if min_size < 0:
        raise DataError(f"expected dataset.min-size to be at least 0, but got {min_size}")
    if num_clients * min_size > len(labels):
        raise DataError(
            f"{num_clients} clients with at least {min_size} samples each (dataset.min-size) need"
            f" {num_clients * min_size} samples, but the data set has {len(labels)}; use at most"
            f" {len(labels) // min_size} clients or, unless the partition fixes it, a dataset.min-size of at most"
            f" {len(labels) // num_clients}"
        )


def check_alpha(alpha: float) -> None:
    """Refuse a concentration of the Dirichlet distribution that isn't above 0 and finite."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise DataError(
            "expected dataset.alpha, the concentration of the Dirichlet distribution, to be above 0 and"
            f" finite, but got {alpha}; use for example 0.1 for very uneven and 100.0 for nearly even clients"
        )


def cut(shares: NDArray[np.float64], num_samples: int) -> Indices:
    """Cut ``num_samples`` at the cumulated shares; returns how many fall to each."""
    # The shares may add up to a rounding error off 1: the last cut is set, the others kept within it.
    cuts = np.minimum(np.floor(np.cumsum(shares) * num_samples), num_samples).astype(np.int64)
    cuts[-1] = num_samples
    return np.diff(cuts, prepend=0)


def _deal(sizes: Indices, generator: np.random.Generator) -> Indices:
    """Return the client of each sample, at random, such that client i gets ``sizes[i]`` of them."""
    return generator.permutation(np.repeat(np.arange(len(sizes), dtype=np.int64), sizes))


def _top_up(owner: Indices, num_clients: int, min_size: int, generator: np.random.Generator) -> None:
    """Move random samples from the largest client, in place, until everybody has ``min_size``.

    While somebody is below ``min_size`` and n >= N min_size, the largest client is above it, so no donor ever
    falls short.
    """
    sizes = np.bincount(owner, minlength=num_clients)
    if sizes.min() >= min_size:
        return
    order = generator.permutation(len(owner))  # so that the last sample of a pool is a random one
    grouped = order[np.argsort(owner[order], kind="stable")]
    pools = [pool.tolist() for pool in np.split(grouped, np.cumsum(sizes)[:-1])]
    largest = [(-len(pool), client) for client, pool in enumerate(pools) if len(pool) > min_size]
    heapq.heapify(largest)
    for client in np.flatnonzero(sizes < min_size):
        for _ in range(min_size - int(sizes[client])):
            donor = largest[0][1]
            owner[pools[donor].pop()] = client
            heapq.heapreplace(largest, (-len(pools[donor]), donor))


def _pathological(
    labels: NDArray[np.generic], num_clients: int, per_client: int, generator: np.random.Generator
) -> Indices:
    classes, class_of = np.unique(labels, return_inverse=True)
    supply = np.bincount(class_of, minlength=len(classes))
    remaining = _num_owners(supply, num_clients, per_client, generator)
    owners: list[list[int]] = [[] for _ in classes]
    for client in generator.permutation(num_clients).tolist():
        # Classes that miss most owners first, ties at random: this never gets stuck (Gale-Ryser).
        chosen = np.lexsort((generator.random(len(classes)), -remaining))[:per_client]
        remaining[chosen] -= 1
        for k in chosen:
            owners[k].append(client)
    owner = np.empty(len(labels), dtype=np.int64)
    for k, clients in enumerate(owners):
        samples = generator.permutation(np.flatnonzero(class_of == k))
        owner[samples] = np.resize(generator.permutation(clients), len(samples))
    return owner


def _num_owners(supply: Indices, num_clients: int, per_client: int, generator: np.random.Generator) -> Indices:
    """Return how many clients own each class: as even as can be, each at least 1 and at most its samples."""
    num_classes, wanted = len(supply), num_clients * per_client
    request = f"partition 'pathological' with {num_clients} clients of {per_client} classes each"
    if per_client < 1:
        raise DataError(f"expected dataset.classes-per-client to be at least 1, but got {per_client}")
    if per_client > num_classes:
        raise DataError(
            f"{request}: the data set has only {num_classes} classes; use a dataset.classes-per-client of"
            f" at most {num_classes}"
        )
    if wanted < num_classes:
        raise DataError(
            f"{request} has {wanted} places for the {num_classes} classes of the data set, so some classes"
            f" would belong to nobody; use at least {-(-num_classes // per_client)} clients or a"
            f" dataset.classes-per-client of at least {-(-num_classes // num_clients)}"
        )
    most = np.minimum(supply, num_clients)
    if most.sum() < wanted:
        raise DataError(
            f"{request} needs a sample for each of {wanted} pairs of a client and one of its classes, but"
            f" the {supply.sum()} samples (the rarest class has {supply.min()}) allow {most.sum()}; use fewer"
            " clients or a smaller dataset.classes-per-client"
        )
    owners = np.zeros(num_classes, dtype=np.int64)
    while (left := wanted - int(owners.sum())) > 0:
        able = np.flatnonzero(owners < most)
        if left < len(able):
            owners[generator.choice(able, left, replace=False)] += 1
        else:
            owners[able] = np.minimum(owners[able] + left // len(able), most[able])
    return owners
