"""Who holds what: label counts of the clients of a partition, and how far they are from all clients together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedstrat.data.protocols import Share

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Holdings:
    """Label counts of N clients for K classes.

    What a client learns from is its training part, so labels, entropy and distance are those of that part.

    Attributes:
        train: Training samples, int64 of shape (N, K).
        test: Test samples, int64 of shape (N, K).
        held_back: Samples that clients hold for validation, neither trained nor tested on.
        unused: Samples of the data set that nobody holds.
        repeated: Training samples that are held more than once, by several clients or by one.
    """

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    held_back: int
    unused: int
    repeated: int

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Training samples of each client, shape (N,)."""
        return np.asarray(self.train.sum(axis=1))

    @property
    def num_labels(self) -> NDArray[np.int64]:
        """How many labels each client trains on at all, shape (N,)."""
        return np.asarray((self.train > 0).sum(axis=1))

    @property
    def entropy(self) -> Floats:
        """``H_i = -sum_k p_ik ln p_ik`` of each client's labels in nats, in [0, ln K]; NaN without them."""
        shares = _shares(self.train)
        logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
        return np.asarray(np.abs((shares * logs).sum(axis=1)))

    @property
    def distance(self) -> Floats:
        """Total variation ``1/2 sum_k |p_ik - p_k|`` to the labels of all clients together, in [0, 1).

        0 for a client whose labels are mixed like those of all; NaN without any.
        """
        everybody = _shares(self.train.sum(axis=0, keepdims=True))
        return np.asarray(np.abs(_shares(self.train) - everybody).sum(axis=1) / 2)


def holdings(labels: ArrayLike, shares: Sequence[Share], num_classes: int) -> Holdings:
    """Count the labels of every client.

    Args:
        labels: Class of each sample, shape (n,), integers in [0, num_classes).
        shares: What each client holds.
        num_classes: K.
    """
    labels = np.asarray(labels)
    train, test = (
        np.array([np.bincount(labels[part], minlength=num_classes) for part in parts], dtype=np.int64)
        for parts in ([share.train for share in shares], [share.test for share in shares])
    )
    trained, tested, validated = (
        np.bincount(np.concatenate(parts), minlength=len(labels)) for parts in zip(*shares, strict=True)
    )
    return Holdings(
        train,
        test,
        held_back=sum(len(share.validation) for share in shares),
        unused=int((trained + tested + validated == 0).sum()),
        repeated=int((trained > 1).sum()),
    )


def _shares(counts: NDArray[np.int64]) -> Floats:
    sizes = counts.sum(axis=1, keepdims=True)
    shares: Floats = np.divide(counts, sizes, out=np.full(counts.shape, np.nan), where=sizes > 0)
    return shares
