"""Normalised FedAvgM: per group q, D = sum_i p_i D_i and a momentum m, 0 at first.

m <- momentum m + D / |D|
x <- x - server_lr m / |m|       length "unit"
x <- x - server_lr m             length "momentum"

Where |D| < max(min_norm, 4 eps32 |x^q|), x <- x - server_lr D, and m stays.
"""

import numpy as np

from tests.reference.craft import EPS32, group_indices
from tests.reference.fedavg import FedAvg
from tests.reference.problem import Task
from tests.reference.rounds import Trained


class NormalisedFedAvgM(FedAvg):
    def __init__(
        self,
        task: Task,
        momentum: float = 0.9,
        server_lr: float = 0.1,
        length: str = "unit",
        grouping: str = "layer",
        min_norm: float = 1e-6,
    ) -> None:
        super().__init__(task, server_lr)
        self.momentum, self.length, self.min_norm = momentum, length, min_norm
        self.groups, self.m = group_indices(grouping), np.zeros_like(task.x0)

    def move(self, trained: dict[int, Trained]) -> None:
        step = self.mean_displacement(trained)
        for at in self.groups.values():
            D = step[at]
            if np.linalg.norm(D) >= max(self.min_norm, 4 * EPS32 * float(np.linalg.norm(self.x[at]))):
                self.m[at] = self.momentum * self.m[at] + D / np.linalg.norm(D)
                step[at] = self.m[at] / np.linalg.norm(self.m[at]) if self.length == "unit" else self.m[at]
        self.x = self.x - self.server_lr * step
