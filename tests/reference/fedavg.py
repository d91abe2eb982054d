"""FedAvg.

x <- x - server_lr * sum_i p_i D_i,    D_i = x - y_i,  p_i = n_i / sum over the cohort
"""

from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained, Twin


class FedAvg(Twin):
    def __init__(self, task: Task, server_lr: float = 1.0) -> None:
        super().__init__(task)
        self.server_lr = server_lr

    def mean_displacement(self, trained: dict[int, Trained]) -> Array:
        p = self.examples_share(trained)
        return sum(p[i] * (self.x - trained[i].y) for i in trained)

    def move(self, trained: dict[int, Trained]) -> None:
        self.x = self.x - self.server_lr * self.mean_displacement(trained)
