"""MoFedSAM: the last round's mean step gradient h (0 at first) enters every local step.

e = rho g / |g|
y <- y - lr (alpha g~ + (1 - alpha) h),    g~ = gradient of the same batch at y + e
h <- mean_S D_i / L_i,                     L_i = sum of the lr of client i's steps
x <- x - server_lr (mean_S L_i) h
"""

import numpy as np

from tests.reference.problem import Task
from tests.reference.rounds import Trained, Twin, descend, toward


class MoFedSAM(Twin):
    def __init__(self, task: Task, rho: float = 0.05, alpha: float = 0.1, server_lr: float = 1.0) -> None:
        super().__init__(task)
        self.rho, self.alpha, self.server_lr, self.h = rho, alpha, server_lr, np.zeros_like(task.x0)

    def local(self, client: int) -> Trained:
        h = self.h
        return descend(
            self.task,
            client,
            self.t,
            self.x,
            self.buffers,
            perturb=lambda g: toward(g, self.rho),
            correct=lambda g, _: self.alpha * g + (1 - self.alpha) * h,
        )

    def move(self, trained: dict[int, Trained]) -> None:
        replies = trained.values()
        self.h = sum((self.x - reply.y) / reply.lr_sum for reply in replies) / len(trained)
        self.x = self.x - self.server_lr * sum(reply.lr_sum for reply in replies) / len(trained) * self.h
