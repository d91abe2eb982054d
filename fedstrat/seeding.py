"""seed(run, round, client) -> generators: the only source of randomness.

A seed is derived from its whole path by SHA-256, so streams of different rounds, clients and purposes are
independent of each other and of the order in which anybody asks for them.
"""

import hashlib

import numpy as np


def derive(seed: int, *path: int | str) -> int:
    """Derive a seed in [0, 2**63) from a run's seed and a path such as ``("batches", client, round)``."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in (seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def rng(seed: int, *path: int | str) -> np.random.Generator:
    """Return NumPy's default generator seeded with :func:`derive`."""
    return np.random.default_rng(derive(seed, *path))
