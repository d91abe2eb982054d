"""FedAvgM: a momentum on the server, 0 before the first round; D = sum_i p_i D_i.

m <- beta m + D
x <- x - server_lr m                  (heavy ball)
x <- x - server_lr (D + beta m)       (Nesterov, with the new m)
"""

import numpy as np

from tests.reference.fedavg import FedAvg
from tests.reference.problem import Task
from tests.reference.rounds import Trained


class FedAvgM(FedAvg):
    def __init__(self, task: Task, momentum: float = 0.9, nesterov: bool = False, server_lr: float = 1.0) -> None:
        super().__init__(task, server_lr)
        self.momentum, self.nesterov, self.m = momentum, nesterov, np.zeros_like(task.x0)

    def move(self, trained: dict[int, Trained]) -> None:
        D = self.mean_displacement(trained)
        self.m = self.momentum * self.m + D
        self.x = self.x - self.server_lr * (D + self.momentum * self.m if self.nesterov else self.m)
