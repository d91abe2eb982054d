"""FedSPU on the problem's two layers: a mask over the flat vector.

Client i draws max(1, floor(r_i 7)) of the 7 hidden units. Chosen are these units' rows of W1 and b1, their columns of
W2, and all of b2. It starts from x where the mask is set and from its own last y elsewhere (from x at first contact),
and its gradient is 0 off the mask.

    x <- sum_i n_i y_i / sum_i n_i      number by number, over the clients whose mask holds it
"""

import math

import numpy as np

from fedstrat.seeding import rng
from tests.reference.problem import CLASSES, EMBEDDED, HIDDEN, Array, Task
from tests.reference.rounds import Trained, Twin, descend


class FedSPU(Twin):
    def __init__(self, task: Task, ratios: str = "0.2,0.4,0.6,0.8,1.0", seed: int = 11) -> None:
        super().__init__(task)
        self.ratios, self.seed = [float(r) for r in ratios.split(",")], seed
        self.own: dict[int, Array] = {}
        self.masks: dict[int, Array] = {}

    def mask(self, client: int) -> Array:
        ratio = self.ratios[client % len(self.ratios)]
        order = rng(self.seed, "units", str(client), self.t - 1).permutation(HIDDEN)
        unit = np.isin(np.arange(HIDDEN), order[: max(1, math.floor(ratio * HIDDEN))])
        return np.concatenate([np.repeat(unit, EMBEDDED), unit, np.tile(unit, CLASSES), np.ones(CLASSES, bool)])

    def local(self, client: int) -> Trained:
        mask = self.masks[client] = self.mask(client)
        start = np.where(mask, self.x, self.own.get(client, self.x))
        return descend(self.task, client, self.t, start, self.buffers, correct=lambda g, _: g * mask)

    def move(self, trained: dict[int, Trained]) -> None:
        n = {i: self.task.num_examples(i) for i in trained}
        weight = sum(n[i] * self.masks[i] for i in trained)
        total = sum(n[i] * self.masks[i] * reply.y for i, reply in trained.items())
        self.x = np.where(weight > 0, total / np.maximum(weight, 1), self.x)
        self.own |= {i: reply.y for i, reply in trained.items()}
