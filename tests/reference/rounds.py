"""What all methods share: a client's SGD and the frame of a round.

A local step, in this order (the rule's correction comes last, so it never is decayed or clipped):

    g <- gradient of the batch at y, or at y + e where the method perturbs
    g <- g + weight_decay * y
    g <- g * min(1, clip_norm / |g|)
    b <- momentum * b + correct(g, y)            b = 0 at the start of a round
    y <- y - lr * b

A round: every client of the cohort trains from the same x; buffers become the mean weighted by examples
(integers: the largest); the method then moves x. D_i = x - y_i points uphill, and servers subtract.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.reference.problem import Array, Buffers, Task


@dataclass(frozen=True)
class Trained:
    """What a client ends a round with; `path_gradient` is the lr-weighted mean of its steps' gradients."""

    y: Array
    buffers: Buffers
    num_steps: int
    lr_sum: float
    path_gradient: Array


def clip(g: Array, clip_norm: float) -> Array:
    """g shortened to clip_norm; 0 clips nothing."""
    norm = float(np.linalg.norm(g))
    return g * (clip_norm / norm) if 0 < clip_norm < norm else g


def descend(
    task: Task,
    client: int,
    round_number: int,
    x: Array,
    buffers: Buffers,
    *,
    correct: Callable[[Array, Array], Array] = lambda g, _: g,
    perturb: Callable[[Array], Array] | None = None,
    stop: Callable[[Array, Buffers], bool] = lambda _y, _buffers: False,
) -> Trained:
    """SGD from x. `stop` is asked at the end of every epoch."""
    y, steps, lr_sum, path, b = x.copy(), 0, 0.0, np.zeros_like(x), np.zeros_like(x)
    for epoch in range(task.epochs):
        lr = task.lr(client, round_number, epoch)
        for rows, labels in task.batches(client):
            g, buffers = task.gradient(y, rows, labels, buffers)
            if perturb is not None:  # the second pass leaves the buffers alone
                g, _ = task.gradient(y + perturb(g), rows, labels, buffers)
            g = clip(g + task.weight_decay * y, task.clip_norm)
            b = task.momentum * b + correct(g, y)
            y = y - lr * b
            path = path + lr * g
            steps, lr_sum = steps + 1, lr_sum + lr
        if stop(y, buffers):
            break
    return Trained(y, buffers, steps, lr_sum, path / lr_sum)


def toward(direction: Array, radius: float) -> Array:
    """The vector of length radius along direction; 0 for a zero direction."""
    return radius * direction / (np.linalg.norm(direction) + 1e-12)


class Twin:
    """`local` is what client i does with the broadcast, `move` what the server does with the cohort."""

    def __init__(self, task: Task) -> None:
        self.task, self.x, self.buffers, self.t = task, task.x0.copy(), task.buffers0, 0

    def local(self, client: int) -> Trained:
        return descend(self.task, client, self.t, self.x, self.buffers)

    def move(self, trained: dict[int, Trained]) -> None:
        raise NotImplementedError

    def examples_share(self, clients: dict[int, Trained]) -> dict[int, float]:
        """p_i = n_i / sum of the cohort's n_j."""
        total = sum(self.task.num_examples(i) for i in clients)
        return {i: self.task.num_examples(i) / total for i in clients}

    def round(self, cohort: list[int]) -> dict[int, Trained]:
        self.t += 1
        trained = {i: self.local(i) for i in sorted(cohort)}
        p = self.examples_share(trained)
        moved = Buffers(
            mean=sum(p[i] * trained[i].buffers.mean for i in trained),
            var=sum(p[i] * trained[i].buffers.var for i in trained),
            batches=max(client.buffers.batches for client in trained.values()),
        )
        self.move(trained)
        self.buffers = moved
        return trained
