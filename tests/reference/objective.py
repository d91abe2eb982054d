"""A client's objective with a further term: MOON's on the hidden layer h, FedNTD's on the outputs s."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.reference.problem import SHAPES, Array, Buffers, Task, slices


@dataclass(frozen=True)
class Forward:
    """What the layers of the problem's model hold for a batch."""

    z: Array
    h: Array
    s: Array


def forward(task: Task, y: Array, rows: Array, mean: Array, var: Array) -> Forward:
    w1, b1, w2, b2 = (y[part].reshape(SHAPES[name]) for name, part in slices().items())
    z = (rows @ task.embed.T - mean) / np.sqrt(var + 1e-5)
    h = np.tanh(z @ w1.T + b1)
    return Forward(z, h, h @ w2.T + b2)


def from_hidden(at: Forward, dh: Array) -> Array:
    """Flat gradient of a term with the gradient dh in h; the output layer has no part in it."""
    da = dh * (1 - at.h**2)
    classes = at.s.shape[1]
    return np.concatenate([(da.T @ at.z).ravel(), da.sum(axis=0), np.zeros(classes * (at.h.shape[1] + 1))])


def from_outputs(at: Forward, ds: Array, y: Array) -> Array:
    """Flat gradient of a term with the gradient ds in s."""
    w2 = y[slices()["output.weight"]].reshape(SHAPES["output.weight"])
    g = from_hidden(at, ds @ w2)
    output = np.concatenate([(ds.T @ at.h).ravel(), ds.sum(axis=0)])
    g[-len(output) :] = output
    return g


Term = Callable[[Array, Array, NDArray[np.int64], Array, Array], Array]
"""(y, rows, labels, mean, var) -> gradient of the term at y."""


@dataclass(frozen=True)
class WithTerm(Task):
    term: Term = lambda y, *_: np.zeros_like(y)

    def gradient(self, y: Array, rows: Array, labels: NDArray[np.int64], buffers: Buffers) -> tuple[Array, Buffers]:
        g, moved = super().gradient(y, rows, labels, buffers)
        f = rows @ self.embed.T
        return g + self.term(y, rows, labels, f.mean(axis=0), f.var(axis=0)), moved
