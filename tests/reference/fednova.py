"""FedNova: every displacement divided by the weights that its gradients have in it.

client:  b <- rho b + g + mu (y - x),  y <- y - lr b,     so  x - y_i = sum_k a_ik g_ik
server:  |a_i| = sum_k a_ik,   tau = sum_i p_i |a_i|,   D = tau sum_i p_i D_i / |a_i|
         x <- x - server_lr D                                                  momentum 0
         m <- beta m + D / lr,   x <- x - server_lr lr m                       lr = sum_i p_i (mean lr of client i)
"""

import numpy as np

from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained, Twin, descend


def step_weights(lrs: list[float], rho: float, mu: float) -> Array:
    """The weight of every gradient, by following each of them on its own through the local steps."""
    in_buffer, weights = np.zeros(len(lrs)), np.zeros(len(lrs))
    for lr, one in zip(lrs, np.eye(len(lrs)), strict=True):
        in_buffer = rho * in_buffer + one - mu * weights
        weights = weights + lr * in_buffer
    return weights


class FedNova(Twin):
    def __init__(self, task: Task, mu: float = 0.0, momentum: float = 0.0, server_lr: float = 1.0) -> None:
        super().__init__(task)
        self.mu, self.momentum, self.server_lr = mu, momentum, server_lr
        self.m = np.zeros_like(task.x0)
        self.norms: dict[int, float] = {}

    def local(self, client: int) -> Trained:
        x, task = self.x, self.task
        lrs = [task.lr(client, self.t, epoch) for epoch in range(task.epochs) for _ in task.batches(client)]
        self.norms[client] = float(step_weights(lrs, task.momentum, self.mu).sum())
        return descend(task, client, self.t, x, self.buffers, correct=lambda g, y: g + self.mu * (y - x))

    def move(self, trained: dict[int, Trained]) -> None:
        p = self.examples_share(trained)
        tau = sum(p[i] * self.norms[i] for i in trained)
        D = tau * sum(p[i] * (self.x - trained[i].y) / self.norms[i] for i in trained)
        if self.momentum == 0:
            self.x = self.x - self.server_lr * D
            return
        lr = sum(p[i] * trained[i].lr_sum / trained[i].num_steps for i in trained)
        self.m = self.momentum * self.m + D / lr
        self.x = self.x - self.server_lr * lr * self.m
