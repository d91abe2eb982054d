"""FedLF: D_i = x - y_i, F_i as in FedFV, per layer l with mu_l = mean_i |D_i,l|.

rows     mu_l D_i,l / |D_i,l|         clients of the round that moved in l
         mu_l G_l / |G_l|             G = sum_i h_i D_i,  h_i = dP/dF_i,  P = -cos(F, 1); none where all F are equal
         mu_l D_j,l / |D_j,l|         last D of clients absent now, seen in the last floor(seen before / m) rounds
d_l      the shortest convex combination of the rows; where it is 0, l is joined with the next layer, else that before
x <- x - server_lr * |mean D_i| d / |d|

The shortest combination is found by trying every subset of rows: its affine hull's point nearest to 0, if inside.
"""

from itertools import chain, combinations

import numpy as np

from tests.reference.craft import EPS32, group_indices
from tests.reference.fedfv import FairTwin
from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained


def shortest(Q: Array) -> Array:
    """The point of the convex hull of the rows nearest to 0."""
    best, least = Q[0], np.inf
    for some in chain.from_iterable(combinations(range(len(Q)), k) for k in range(1, len(Q) + 1)):
        corner, edges = Q[some[0]], Q[list(some[1:])] - Q[some[0]]
        w = np.linalg.lstsq(edges.T, -corner, rcond=1e-12)[0] if len(edges) else np.zeros(0)
        point = corner + w @ edges
        if (w >= -1e-12).all() and w.sum() <= 1 + 1e-12 and np.linalg.norm(point) < least:
            best, least = point, float(np.linalg.norm(point))
    return best


class FedLF(FairTwin):
    def __init__(self, task: Task, server_lr: float = 1.0, grouping: str = "tensor") -> None:
        super().__init__(task)
        self.server_lr, self.layers = server_lr, list(group_indices(grouping).values())
        self.last: dict[int, tuple[int, Array]] = {}
        self.joined = self.remembered = 0

    def move(self, trained: dict[int, Trained]) -> None:
        D = {i: self.x - trained[i].y for i in trained}
        tau = len(self.last) // len(D)
        absent = [v for i, (seen, v) in sorted(self.last.items()) if i not in D and self.t - seen <= tau]
        self.remembered += len(absent)
        self.last |= {i: (self.t, v) for i, v in D.items()}

        F = np.array(list(self.losses(trained).values()))
        size, even = np.linalg.norm(F), np.ones(len(F)) / np.sqrt(len(F))
        h = even @ F / size**3 * F - even / size
        G = sum(h[k] * v for k, v in enumerate(D.values())) if len(F) > 1 else np.zeros_like(self.x)

        layers, d = list(self.layers), np.zeros_like(self.x)
        k = 0
        while k < len(layers):
            at = layers[k]
            moved = [v for v in D.values() if self.moves(v, at)]
            mu = np.mean([np.linalg.norm(v[at]) for v in D.values()])
            rows = [*moved, *([G] if np.linalg.norm(G[at]) > 0 else [])]
            rows += [v for v in absent if self.moves(v, at)]
            d[at] = shortest(mu * np.stack([v[at] / np.linalg.norm(v[at]) for v in rows])) if moved else 0
            if moved and np.linalg.norm(d[at]) <= 1e-5 * mu:
                d[at] = 0
                if len(layers) > 1:
                    k = min(k, len(layers) - 2)
                    layers[k : k + 2] = [np.concatenate(layers[k : k + 2])]
                    self.joined += 1
                    continue
            k += 1
        length = np.linalg.norm(np.mean(list(D.values()), axis=0))
        self.x = self.x - self.server_lr * length * d / np.linalg.norm(d)

    def moves(self, v: Array, at: Array) -> bool:
        return bool(np.linalg.norm(v[at]) >= 4 * EPS32 * np.linalg.norm(self.x[at]) and np.linalg.norm(v[at]) > 0)
