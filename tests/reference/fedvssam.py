"""FedVSSAM: a smoothed global gradient h (0 at first) steers both the perturbation and the step.

    b = (1 - gamma_l) h + gamma_l g        g  = gradient of the batch at y, without weight decay
    e = rho b / |b|
    u = (1 - gamma_l) h + gamma_l g~       g~ = gradient of the same batch at y + e
    y <- y - lr u
    g^ = mean_S D_i / L_i                  L_i = sum of the lr of client i's steps
    h <- (1 - gamma_g) h + gamma_g g^
    x <- x - eta h (the new one)           eta = server_lr mean_S L_i ("relative") or server_lr ("absolute")

Switches: perturb "gradient" takes b = g, update "gradient" takes u = g~.
"""

import numpy as np

from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained, Twin, descend, toward


class FedVSSAM(Twin):
    def __init__(
        self,
        task: Task,
        rho: float = 0.05,
        gamma_l: float = 0.4,
        gamma_g: float = 0.6,
        server_lr: float = 1.0,
        server_lr_scale: str = "relative",
        perturb: str = "mixed",
        update: str = "mixed",
    ) -> None:
        super().__init__(task)
        self.rho, self.gamma_l, self.gamma_g, self.server_lr = rho, gamma_l, gamma_g, server_lr
        self.server_lr_scale, self.perturb, self.update = server_lr_scale, perturb, update
        self.h = np.zeros_like(task.x0)

    def local(self, client: int) -> Trained:
        h = self.h

        def mixed(g: Array, switch: str) -> Array:
            return (1 - self.gamma_l) * h + self.gamma_l * g if switch == "mixed" else g

        return descend(
            self.task,
            client,
            self.t,
            self.x,
            self.buffers,
            perturb=lambda g: toward(mixed(g, self.perturb), self.rho),
            correct=lambda g, _: mixed(g, self.update),
        )

    def move(self, trained: dict[int, Trained]) -> None:
        replies, m = trained.values(), len(trained)
        estimate = sum((self.x - reply.y) / reply.lr_sum for reply in replies) / m
        self.h = (1 - self.gamma_g) * self.h + self.gamma_g * estimate
        relative = sum(reply.lr_sum for reply in replies) / m if self.server_lr_scale == "relative" else 1.0
        self.x = self.x - self.server_lr * relative * self.h
