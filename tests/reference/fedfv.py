"""FedFV: D_i = x - y_i, F_i = loss of client i's whole data at x, running statistics at rest.

Internal: the clients at positions >= ceil((m - 1)(1 - alpha)) in ascending F stay (nobody for alpha = 0); any other i
    goes through all j != i in ascending F and, where <D_j, E_i> < 0, loses <D_j, E_i> / |D_j|^2 D_j;  g = mean E_i
External, in round tau and later: for k = tau - 1 ... 0, c = sum of the last D of the clients last seen in round t - k
    with <g, D> < 0;  where <g, c> < 0, g loses <g, c> / |c|^2 c
x <- x - server_lr * |mean D_i| g / |g|
"""

import math

import numpy as np

from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained, Twin


def without(v: Array, other: Array) -> Array:
    """v without its part along other, where the two conflict."""
    inner = v @ other
    return v - inner / (other @ other) * other if inner < 0 else v


class FairTwin(Twin):
    def losses(self, clients: dict[int, Trained]) -> dict[int, float]:
        """F_i at the received model."""
        task, at = self.task, self.buffers
        return {i: task.loss_and_gradient(self.x, task.rows[i], task.labels[i], at.mean, at.var)[0] for i in clients}


class FedFV(FairTwin):
    def __init__(self, task: Task, alpha: float = 0.1, tau: int = 1, server_lr: float = 1.0) -> None:
        super().__init__(task)
        self.alpha, self.tau, self.server_lr = alpha, tau, server_lr
        self.last: dict[int, tuple[int, Array]] = {}
        self.projected = {"internal": 0, "external": 0}

    def move(self, trained: dict[int, Trained]) -> None:
        D = {i: self.x - trained[i].y for i in trained}
        self.last |= {i: (self.t, v) for i, v in D.items()}
        F = self.losses(trained)
        order = sorted(F, key=F.__getitem__)
        kept = order[math.ceil((len(order) - 1) * (1 - self.alpha)) :] if self.alpha else []
        E = dict(D)
        for i in set(D) - set(kept):
            for j in order:
                if j != i:
                    self.projected["internal"] += int(D[j] @ E[i] < 0)
                    E[i] = without(E[i], D[j])
        g = np.mean(list(E.values()), axis=0)
        for k in range(self.tau - 1, -1, -1) if self.t >= self.tau else ():
            c = [v for seen, v in self.last.values() if seen == self.t - k and g @ v < 0]
            self.projected["external"] += len(c) * (k > 0)
            g = without(g, np.sum(c, axis=0)) if c else g
        length = np.linalg.norm(np.mean(list(D.values()), axis=0))
        self.x = self.x - self.server_lr * length * g / np.linalg.norm(g)
