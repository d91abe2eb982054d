"""AFL: lambda is 1/N for each of all N clients at first; F_i is client i's loss over all its data at the model.

model  <- model - server_lr sum_S lambda_i D_i / sum_S lambda_i        (1/|S| each where that sum is 0)
lambda <- nearest point of the simplex to lambda + lambda_lr F         (F_i = 0 outside of S)
x      <- mean of the models after every round so far                  (x is what is evaluated)
"""

import numpy as np

from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained, Twin, descend


def nearest_on_simplex(v: Array) -> Array:
    """max(v - t, 0), with the t of the largest number of positive entries that fits."""
    falling = np.sort(v)[::-1]
    ts = (np.cumsum(falling) - 1) / np.arange(1, len(v) + 1)
    return np.maximum(v - ts[np.flatnonzero(falling > ts)[-1]], 0)


class AFL(Twin):
    def __init__(self, task: Task, lambda_lr: float = 0.01, server_lr: float = 1.0) -> None:
        super().__init__(task)
        self.lambda_lr, self.server_lr = lambda_lr, server_lr
        self.mixture = np.full(len(task.rows), 1 / len(task.rows))
        self.models = [task.x0]
        self.losses = np.zeros(len(task.rows))

    def local(self, client: int) -> Trained:
        model = self.models[-1]
        self.losses[client] = self.task.full_loss(client, model, self.buffers)
        return descend(self.task, client, self.t, model, self.buffers)

    def move(self, trained: dict[int, Trained]) -> None:
        cohort, model = list(trained), self.models[-1]
        share = self.mixture[cohort] if self.mixture[cohort].any() else np.ones(len(cohort))
        D = np.stack([model - trained[i].y for i in cohort])
        self.models.append(model - self.server_lr * (share / share.sum()) @ D)
        raised = self.mixture.copy()
        raised[cohort] += self.lambda_lr * self.losses[cohort]
        self.mixture = nearest_on_simplex(raised)
        self.x = np.mean(self.models[1:], axis=0)
