"""FedACG: clients start from z = x + lambda m and stay near it; m is 0 at first; x is what is evaluated.

y <- y - lr (g + beta (y - z))
m <- lambda m - sum_i p_i (z - y_i)
x <- x + m
"""

import numpy as np

from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained, Twin, descend


class FedACG(Twin):
    def __init__(self, task: Task, momentum: float = 0.85, beta: float = 0.002) -> None:
        super().__init__(task)
        self.momentum, self.beta, self.m = momentum, beta, np.zeros_like(task.x0)

    @property
    def z(self) -> Array:
        return self.x + self.momentum * self.m

    def local(self, client: int) -> Trained:
        z = self.z
        return descend(self.task, client, self.t, z, self.buffers, correct=lambda g, y: g + self.beta * (y - z))

    def move(self, trained: dict[int, Trained]) -> None:
        p, z = self.examples_share(trained), self.z
        self.m = self.momentum * self.m - sum(p[i] * (z - trained[i].y) for i in trained)
        self.x = self.x + self.m
