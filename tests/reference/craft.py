"""CRAFT: per group q of parameters, with D_i = (x - y_i)^q and the clients whose |D_i| is worth a direction.

    active:  |D_i| >= max(min_norm, 4 eps32 |x^q|)
    U   = rows D_i / |D_i|
    rho = n_i / sum over the active
    r   = g_prev / |g_prev|, or 0 at first
    g   = r + U^+ (rho - U r)
    x  <- x - server_lr g

U^+ keeps singular values above rtol times the largest and, while |g| > max_norm, drops the smallest left.
One active client: the same formula, or ("raw") its D_i as it is.
reference "ema" puts a running mean, g_prev <- decay g_prev + (1 - decay) g, in the place of g_prev.
Nobody active: g = sum_i p_i D_i over the cohort, and the group keeps its g_prev.
"""

import numpy as np

from tests.reference.problem import Array, Task, slices
from tests.reference.rounds import Trained, Twin

EPS32 = float(np.finfo(np.float32).eps)


def constrained(U: Array, rho: Array, r: Array, rtol: float, max_norm: float) -> Array:
    """The g nearest to r with U g = rho, as far as the kept singular values allow."""
    left, sigma, right = np.linalg.svd(U.astype(np.float64), full_matrices=False)
    kept = int((sigma > rtol * sigma[0]).sum())
    missing = left.T @ (rho - U @ r)
    for rank in range(kept, -1, -1):
        g = r + right[:rank].T @ (missing[:rank] / sigma[:rank])
        if np.linalg.norm(g) <= max_norm:
            break
    return g.astype(U.dtype)


def group_indices(grouping: str) -> dict[str, Array]:
    """Group name -> positions in the flat vector; a layer is a module's weight and bias."""
    names = {"layer": lambda n: n.rpartition(".")[0], "tensor": lambda n: n, "model": lambda _: "model"}
    groups: dict[str, list[int]] = {}
    for name, part in slices().items():
        groups.setdefault(names[grouping](name), []).extend(range(part.start, part.stop))
    return {name: np.array(positions) for name, positions in groups.items()}


class CRAFT(Twin):
    def __init__(
        self,
        task: Task,
        server_lr: float = 0.1,
        grouping: str = "layer",
        min_norm: float = 1e-6,
        rtol: float = 1e-3,
        max_norm: float = 10.0,
        single_client: str = "formula",
        reference: str = "previous",
        reference_decay: float = 0.9,
    ) -> None:
        super().__init__(task)
        self.server_lr, self.groups = server_lr, group_indices(grouping)
        self.min_norm, self.rtol, self.max_norm, self.single_client = min_norm, rtol, max_norm, single_client
        self.decay = reference_decay if reference == "ema" else 0.0
        self.previous = {q: np.zeros(len(at), task.x0.dtype) for q, at in self.groups.items()}
        self.active: dict[str, list[int]] = {}

    def move(self, trained: dict[int, Trained]) -> None:
        step = np.zeros_like(self.x)
        for q, at in self.groups.items():
            D = {i: self.x[at] - trained[i].y[at] for i in trained}
            threshold = max(self.min_norm, 4 * EPS32 * float(np.linalg.norm(self.x[at])))
            self.active[q] = [i for i in D if np.linalg.norm(D[i]) >= threshold]
            if self.active[q]:
                step[at] = g = self.direction(q, {i: D[i] for i in self.active[q]})
                self.previous[q] = self.decay * self.previous[q] + (1 - self.decay) * g
            else:
                p = self.examples_share(trained)
                step[at] = sum(p[i] * D[i] for i in D)
        self.x = self.x - self.server_lr * step

    def direction(self, q: str, D: dict[int, Array]) -> Array:
        rows = np.stack(list(D.values()))
        if len(rows) == 1 and self.single_client == "raw":
            return rows[0]
        n = np.array([self.task.num_examples(i) for i in D])
        U = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        length = np.linalg.norm(self.previous[q])
        r = self.previous[q] / length if length > 0 else self.previous[q]
        return constrained(U, (n / n.sum()).astype(U.dtype), r, self.rtol, self.max_norm)
