"""How evenly a model serves the clients: statistics over per-client accuracies."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fairness:
    """Accuracy of one model over n clients, each on its own test data.

    Attributes:
        mean: Unweighted mean of the clients' accuracies, in [0, 1]; every client counts the same.
        accuracy: Correct answers over examples, in [0, 1]; every example counts the same.
        best10: Mean of the ceil(n / 10) highest client accuracies.
        worst10: Mean of the ceil(n / 10) lowest client accuracies.
        std: Population standard deviation (ddof 0) of the client accuracies, in [0, 1/2].
        loss: Summed loss over examples.
        num_clients: n, the clients that had test data.
        worst: The lowest client accuracy.
    """

    mean: float
    accuracy: float
    best10: float
    worst10: float
    std: float
    loss: float
    num_clients: int
    worst: float = math.nan


def fairness(counts: Mapping[str, tuple[int, float, int]]) -> Fairness | None:
    """Summarise per-client counts; the order of the clients never changes a bit of the result.

    Args:
        counts: Client id -> (number correct, summed loss, number of test examples). Clients without
            examples have no accuracy and are left out.

    Returns:
        The statistics, or None when no client had an example.
    """
    rows = [row for row in counts.values() if row[2] > 0]
    if not rows:
        return None
    accuracies = sorted(correct / examples for correct, _, examples in rows)
    tenth = -(-len(rows) // 10)  # ceil without a float
    mean = _mean(accuracies)
    total = sum(examples for _, _, examples in rows)
    return Fairness(
        mean=mean,
        accuracy=sum(correct for correct, _, _ in rows) / total,
        best10=_mean(accuracies[-tenth:]),
        worst10=_mean(accuracies[:tenth]),
        std=math.sqrt(_mean([(value - mean) ** 2 for value in accuracies])),
        loss=_sum([loss for _, loss, _ in rows]) / total,
        num_clients=len(rows),
        worst=accuracies[0],
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _sum(values: Sequence[float]) -> float:
    """Exactly rounded sum, so independent of order; inf or NaN as IEEE gives it where ``fsum`` raises."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(sorted(values))
