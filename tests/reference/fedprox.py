"""FedProx: FedAvg's server; a client minimises h(y) = f_i(y) + mu/2 |y - x|^2.

    y <- y - lr (g + mu (y - x))

With gamma > 0 the client stops at the end of the first epoch where
    |grad h(y)| <= gamma |grad h(x)|,     grad h(y) = grad f_i(y) + mu (y - x)
over all its data, weight decay being part of f_i.
"""

import numpy as np

from tests.reference.fedavg import FedAvg
from tests.reference.problem import Array, Buffers, Task
from tests.reference.rounds import Trained, descend


class FedProx(FedAvg):
    def __init__(self, task: Task, mu: float = 0.1, gamma: float = 0.0) -> None:
        super().__init__(task)
        self.mu, self.gamma = mu, gamma

    def local(self, client: int) -> Trained:
        x = self.x
        at_start = float(np.linalg.norm(self.task.full_gradient(client, x, self.buffers)))

        def stop(y: Array, buffers: Buffers) -> bool:
            here = self.task.full_gradient(client, y, buffers) + self.mu * (y - x)
            return self.gamma > 0 and float(np.linalg.norm(here)) <= self.gamma * at_start

        return descend(
            self.task, client, self.t, x, self.buffers, correct=lambda g, y: g + self.mu * (y - x), stop=stop
        )
