"""A small federated problem whose gradients are written out by hand, in NumPy alone.

Model (named as a torch module would name it), for a batch of n rows X (n, F) with labels c (n,):

    f = X E^T                                   embed.weight E        (M, F)  frozen
    z = (f - mean) / sqrt(var + 1e-5)           norm.running_mean, norm.running_var, norm.num_batches_tracked
    h = tanh(z W1^T + b1)                       hidden.weight, hidden.bias
    s = h W2^T + b2                             output.weight, output.bias
    loss = mean_n( -log softmax(s)[c] )

While training, mean and var are the batch's own (var divided by n), and the running statistics move by a
tenth towards them (var divided by n - 1 there), counted by the integer buffer. Outside training the running
statistics normalise. No gradient passes through z, since everything before it is frozen.

The trainable parameters are one flat vector: hidden.weight, hidden.bias, output.weight, output.bias.
Clients differ in size, class mix and learning rate, and see their rows in the same order in every epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]

FEATURES, EMBEDDED, HIDDEN, CLASSES = 5, 6, 7, 3
SHAPES: dict[str, tuple[int, ...]] = {
    "hidden.weight": (HIDDEN, EMBEDDED),
    "hidden.bias": (HIDDEN,),
    "output.weight": (CLASSES, HIDDEN),
    "output.bias": (CLASSES,),
}
SIZES = (
    7,
    12,
    20,
    34,
    6,
    15,
    26,
    10,
)  # never 1 more than a multiple of the batch size: one row has no variance


def slices() -> dict[str, slice]:
    """Where each tensor lies in the flat vector."""
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()]).tolist()
    return {name: slice(start, end) for name, start, end in zip(SHAPES, [0, *ends[:-1]], ends, strict=True)}


@dataclass(frozen=True)
class Buffers:
    """The running statistics (M,) and the number of training batches seen."""

    mean: Array
    var: Array
    batches: int


@dataclass(frozen=True)
class Task:
    """Data, starting point and local training of every client; nothing of it ever changes."""

    rows: tuple[Array, ...]
    labels: tuple[NDArray[np.int64], ...]
    embed: Array
    x0: Array
    buffers0: Buffers
    batch_size: int = 4
    epochs: int = 2
    weight_decay: float = 0.02
    clip_norm: float = 0.0  # 0: not clipped
    epoch_decay: float = 0.8  # of the learning rate, inside a round
    momentum: float = 0.0  # of the local steps, heavy ball
    idle: int = -1  # a client whose learning rate is nearly 0

    def num_examples(self, client: int) -> int:
        return len(self.labels[client])

    def lr(self, client: int, round_number: int, epoch: int) -> float:
        """Differs between clients, falls from round to round and, inside a round, from epoch to epoch."""
        scale = 3e-7 if client == self.idle else 1.0
        return scale * 0.1 * (1 + 0.1 * client) * 0.95 ** (round_number - 1) * self.epoch_decay**epoch

    def batches(self, client: int) -> Iterator[tuple[Array, NDArray[np.int64]]]:
        for start in range(0, self.num_examples(client), self.batch_size):
            chosen = slice(start, start + self.batch_size)
            yield self.rows[client][chosen], self.labels[client][chosen]

    def loss_and_gradient(
        self, y: Array, rows: Array, labels: NDArray[np.int64], mean: Array, var: Array
    ) -> tuple[float, Array]:
        """Loss and flat gradient at y with the given normalisation."""
        w1, b1, w2, b2 = (y[part].reshape(SHAPES[name]) for name, part in slices().items())
        n = len(labels)
        z = (rows @ self.embed.T - mean) / np.sqrt(var + 1e-5)
        h = np.tanh(z @ w1.T + b1)
        s = h @ w2.T + b2
        s = s - s.max(axis=1, keepdims=True)
        log_p = s - np.log(np.exp(s).sum(axis=1, keepdims=True))
        loss = float(-log_p[np.arange(n), labels].mean())

        ds = np.exp(log_p)
        ds[np.arange(n), labels] -= 1
        ds /= n
        da = (ds @ w2) * (1 - h**2)
        parts = (da.T @ z, da.sum(axis=0), ds.T @ h, ds.sum(axis=0))
        return loss, np.concatenate([part.ravel() for part in parts])

    def gradient(self, y: Array, rows: Array, labels: NDArray[np.int64], buffers: Buffers) -> tuple[Array, Buffers]:
        """The gradient of one training batch, and the buffers after the forward pass."""
        f = rows @ self.embed.T
        mean, var, n = f.mean(axis=0), f.var(axis=0), len(f)
        _, g = self.loss_and_gradient(y, rows, labels, mean, var)
        moved = Buffers(
            mean=0.9 * buffers.mean + 0.1 * mean,
            var=0.9 * buffers.var + 0.1 * var * (n / (n - 1)),
            batches=buffers.batches + 1,
        )
        return g, moved

    def full_loss(self, client: int, y: Array, buffers: Buffers) -> float:
        """Loss over all of the client's data, without decay, with the running statistics at rest."""
        loss, _ = self.loss_and_gradient(y, self.rows[client], self.labels[client], buffers.mean, buffers.var)
        return loss

    def full_gradient(self, client: int, y: Array, buffers: Buffers) -> Array:
        """Gradient of the client's whole objective, decay included, with the running statistics at rest."""
        _, g = self.loss_and_gradient(y, self.rows[client], self.labels[client], buffers.mean, buffers.var)
        return g + self.weight_decay * y


def make_task(dtype: type[np.floating] = np.float64, **training: float) -> Task:
    """The same numbers for every dtype, all of them exact in float32; ``training`` sets fields of Task."""
    rng = np.random.default_rng(20240)

    def draw(*shape: int) -> Array:
        return rng.normal(size=shape).astype(np.float32).astype(dtype)

    true = draw(CLASSES, FEATURES)
    rows, labels = [], []
    for client, size in enumerate(SIZES):
        x = draw(size, FEATURES) + draw(FEATURES)
        scores = x @ true.T
        scores[:, client % CLASSES] += 3  # each client has a favourite class
        rows.append(x)
        labels.append(scores.argmax(axis=1).astype(np.int64))
    size = sum(int(np.prod(shape)) for shape in SHAPES.values())
    return Task(
        rows=tuple(rows),
        labels=tuple(labels),
        embed=draw(EMBEDDED, FEATURES),
        x0=draw(size) * dtype(0.5),
        buffers0=Buffers(np.zeros(EMBEDDED, dtype), np.ones(EMBEDDED, dtype), 0),
        **training,
    )
