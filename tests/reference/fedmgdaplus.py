"""FedMGDA+: with D_i = x - y_i of the clients that moved, and p_i = n_i / sum over them.

u_i = D_i / |D_i|
lambda = argmin |sum_i lambda_i u_i|^2,   lambda >= 0,  sum lambda = 1,  |lambda_i - p_i| <= epsilon
x <- x - server_lr * sum_i lambda_i u_i

The minimum is found by trying every case: each weight is at its lower bound, at its upper bound, or between.
"""

from itertools import product

import numpy as np

from tests.reference.craft import EPS32
from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained, Twin


def shortest(U: Array, low: Array, high: Array) -> Array:
    """The shortest sum_i w_i u_i with low <= w <= high and sum w = 1; U has one u_i per row."""
    A = U @ U.T
    best, least = None, np.inf
    for case in product((0, 1, 2), repeat=len(U)):
        at = np.array(case)
        w, free = np.where(at == 0, low, high), np.flatnonzero(at == 2)
        if len(free):
            w[free] = 0
            k = len(free)
            # Stationary on the free weights: A_ff w_f + A_fb w_b = nu, and they fill the sum up to 1.
            system = np.block([[A[np.ix_(free, free)], np.ones((k, 1))], [np.ones((1, k)), np.zeros((1, 1))]])
            right = np.append(-(A @ w)[free], 1 - w.sum())
            w[free] = np.linalg.lstsq(system, right, rcond=None)[0][:k]
        inside = (w >= low - 1e-12).all() and (w <= high + 1e-12).all() and abs(w.sum() - 1) < 1e-12
        if inside and w @ A @ w < least:
            best, least = w, w @ A @ w
    assert best is not None
    return best @ U


class FedMGDAPlus(Twin):
    def __init__(self, task: Task, epsilon: float = 0.1, server_lr: float = 1.0) -> None:
        super().__init__(task)
        self.epsilon, self.server_lr = epsilon, server_lr

    def move(self, trained: dict[int, Trained]) -> None:
        D = {i: self.x - trained[i].y for i in trained}
        D = {i: v for i, v in D.items() if np.linalg.norm(v) >= 4 * EPS32 * np.linalg.norm(self.x)}
        n = np.array([self.task.num_examples(i) for i in D])
        p = n / n.sum()
        U = np.stack([v / np.linalg.norm(v) for v in D.values()])
        bounds = np.maximum(p - self.epsilon, 0), np.minimum(p + self.epsilon, 1)
        self.x = self.x - self.server_lr * shortest(U, *bounds)
