"""ConFIG: CRAFT without a reference direction, per group, and with a length rule.

b = U^+ w,    U = rows D_i / |D_i|,   w = n_i / sum n_j ("examples") or 1/m ("equal")
raw:         g = b
projection:  g = (sum_i w_i <D_i, b/|b|>) b/|b|
mean_norm:   g = (sum_i w_i |D_i|) b/|b|
x <- x - server_lr g
"""

import numpy as np

from tests.reference.craft import CRAFT, constrained
from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained


class ConFIG(CRAFT):
    def __init__(
        self,
        task: Task,
        server_lr: float = 1.0,
        length: str = "projection",
        weights: str = "examples",
        grouping: str = "layer",
    ) -> None:
        super().__init__(task, server_lr, grouping)
        self.length, self.weights = length, weights

    def move(self, trained: dict[int, Trained]) -> None:
        self.w = self.examples_share(trained)
        if self.weights == "equal":
            self.w = dict.fromkeys(trained, 1 / len(trained))
        super().move(trained)

    def direction(self, q: str, D: dict[int, Array]) -> Array:
        rows = np.stack(list(D.values()))
        w = np.array([self.w[i] for i in D], dtype=rows.dtype)
        norms = np.linalg.norm(rows, axis=1)
        b = constrained(rows / norms[:, None], w / w.sum(), np.zeros_like(rows[0]), self.rtol, self.max_norm)
        if self.length == "raw":
            return b
        unit = b / np.linalg.norm(b)
        return float(w @ (rows @ unit if self.length == "projection" else norms)) * unit
