"""FedCSPACK: packs of B numbers of the flat vector, padded with zeros at its end.

A client starts from x at first contact, or always ("dense"); later from its own last y with x written over the packs
that it is told of, and z is what it knows of x:

    synced:  the packs that anybody sent in a round since (and with) the one in which the client last trained
    mask:    the packs that anybody sent in the last round, whatever the client missed

With w = y and cosines over the padded vectors:

    candidates  j with cos(w_j, z_j) < cos(w, z); the K most turned ones, where there is a K
    M_j = |KL(softmax(z_j / T) || softmax(w_j / T)) + cos(w_j, z_j)|, or one of the two, at least 1e-12
    x_j <- sum_i M_ij w_ij / sum_i M_ij      where anybody sent j

With error feedback a client adds its local movements up and takes off what it sent: w = z + (that sum).
"""

import math

import numpy as np

from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained, Twin, descend


def packed(flat: Array, size: int) -> Array:
    """(P, B), zeros at the end."""
    count = -(-len(flat) // size)
    padded = np.zeros(count * size, flat.dtype)
    padded[: len(flat)] = flat
    return padded.reshape(count, size)


def cosine(a: Array, b: Array) -> float:
    la, lb = math.sqrt(float(a @ a)), math.sqrt(float(b @ b))
    if la == lb == 0:
        return 1.0
    return float(a @ b) / (max(la, 1e-8) * max(lb, 1e-8))


def softmax(a: Array) -> Array:
    e = np.exp(a - a.max())
    return e / e.sum()


def divergence(w: Array, z: Array, temperature: float) -> float:
    p, q = softmax(z / temperature), softmax(w / temperature)
    return float((p * np.log(p / q)).sum())


def select(
    w: Array,
    z: Array,
    weights: str,
    top_k: int | None = None,
    keep_ratio: float | None = None,
    temperature: float = 1.0,
) -> dict[int, float]:
    """Pack number -> M, of packs w and z (P, B)."""
    if weights == "full":
        return dict.fromkeys(range(len(z)), 1.0)
    w, z = w.astype(np.float64), z.astype(np.float64)
    theta = [cosine(a, b) for a, b in zip(w, z, strict=True)]
    bound = cosine(w.ravel(), z.ravel())
    candidates = sorted((j for j in range(len(z)) if theta[j] < bound), key=lambda j: (theta[j], j))
    if keep_ratio is not None:
        top_k = math.ceil(keep_ratio * len(z))
    chosen = {}
    for j in sorted(candidates[:top_k]):
        kappa = divergence(w[j], z[j], temperature) if weights != "cosine" else 0.0
        m = max(abs(kappa + (theta[j] if weights != "kl" else 0.0)), 1e-12)
        chosen[j] = float(np.float32(m))  # weights travel in 4 bytes
    return chosen


class FedCSPACK(Twin):
    def __init__(
        self,
        task: Task,
        pack_size: int = 1024,
        top_k: int | None = None,
        keep_ratio: float | None = None,
        weights: str = "dual",
        kl_temperature: float = 1.0,
        downlink: str = "synced",
        error_feedback: bool = False,
    ) -> None:
        super().__init__(task)
        self.pack_size, self.downlink = pack_size, downlink
        self.choice = {"weights": weights, "top_k": top_k, "keep_ratio": keep_ratio, "temperature": kl_temperature}
        self.sent_in: list[set[int]] = [set()]  # round -> packs that anybody sent
        self.last: dict[int, int] = {}  # client -> round in which it last trained
        self.own: dict[int, Array] = {}
        self.known: dict[int, Array] = {}
        self.feeds_back = error_feedback
        self.movement: dict[int, Array] = {}  # of this round
        self.moved: dict[int, Array] = {}  # client -> sum of y - start over its rounds
        self.sent: dict[int, Array] = {}  # client -> sum of what it sent

    def told(self, client: int) -> Array:
        """Which entries of the flat vector the client is sent."""
        if self.downlink == "dense" or client not in self.last:
            return np.ones(len(self.x), bool)
        since = self.last[client] if self.downlink == "synced" else self.t - 1
        packs = set().union(*self.sent_in[since : self.t])
        return np.isin(np.arange(len(self.x)) // self.pack_size, list(packs))

    def local(self, client: int) -> Trained:
        told = self.told(client)
        start = np.where(told, self.x, self.own.get(client, self.x))
        self.known[client] = np.where(told, self.x, self.known.get(client, self.x))
        trained = descend(self.task, client, self.t, start, self.buffers)
        self.movement[client] = trained.y - start
        return trained

    def move(self, trained: dict[int, Trained]) -> None:
        x = packed(self.x, self.pack_size)
        total, summed = np.zeros(len(x)), np.zeros_like(x)
        for i, reply in trained.items():
            w, z = packed(reply.y, self.pack_size), packed(self.known[i], self.pack_size)
            if self.feeds_back:
                self.moved[i] = self.moved.get(i, 0.0) + packed(self.movement[i], self.pack_size)
                self.sent.setdefault(i, np.zeros_like(w))
                w = z + (self.moved[i] - self.sent[i])
            for j, m in select(w, z, **self.choice).items():
                total[j] += m
                summed[j] += m * w[j]
                if self.feeds_back:
                    self.sent[i][j] += w[j] - z[j]
            self.own[i], self.last[i] = reply.y, self.t
        sent = total > 0
        x[sent] = summed[sent] / total[sent, None]
        self.sent_in.append(set(np.flatnonzero(sent).tolist()))
        self.x = x.ravel()[: len(self.x)]
