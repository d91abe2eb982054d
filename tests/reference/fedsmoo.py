"""FedSMOO: a dual mu_i for the perturbation and a memory h_i of the displacement per client, 0 at first.

v = g - mu_i - s,   e = rho v / |v|,   mu_i <- mu_i + e - s          in every step; g at y, without weight decay
y <- y - lr (g~ + lamb (y - x + h_i))                                g~ = gradient of the same batch at y + e
h_i <- h_i - D_i                                                     after training
s <- rho m / |m|,   m = mean_S mu_i                                  0 at first
x <- mean_S y_i + (mean of h_i over all N clients)                   lamb 0: without h
"""

import numpy as np

from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained, Twin, descend, toward


class FedSMOO(Twin):
    def __init__(self, task: Task, rho: float = 0.1, lamb: float = 0.1) -> None:
        super().__init__(task)
        self.rho, self.lamb, self.s = rho, lamb, np.zeros_like(task.x0)
        self.duals = [np.zeros_like(task.x0) for _ in task.rows]
        self.memories = [np.zeros_like(task.x0) for _ in task.rows]

    def local(self, client: int) -> Trained:
        x, s, h = self.x, self.s, self.memories[client]

        def perturb(g: Array) -> Array:
            e = toward(g - self.duals[client] - s, self.rho)
            self.duals[client] = self.duals[client] + e - s
            return e

        trained = descend(
            self.task,
            client,
            self.t,
            x,
            self.buffers,
            perturb=perturb,
            correct=lambda g, y: g + self.lamb * (y - x + h),
        )
        if self.lamb:
            self.memories[client] = h + trained.y - x
        return trained

    def move(self, trained: dict[int, Trained]) -> None:
        self.s = toward(sum(self.duals[i] for i in trained) / len(trained), self.rho)
        self.x = sum(reply.y for reply in trained.values()) / len(trained) + sum(self.memories) / len(self.memories)
