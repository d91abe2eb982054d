"""Goals that end a run early: a target accuracy, or no progress for a while."""

from fedstrat.metrics.rounds import RoundReport


class Goals:
    """Says after every round whether the run has reached its end.

    Args:
        target_accuracy: Mean client accuracy in (0, 1] that ends the run; 0: none.
        patience: Evaluations without a new best mean accuracy that end the run; 0: any number.

    Attributes:
        reason: Why the run ends, in words; empty while it goes on.
    """

    def __init__(self, target_accuracy: float = 0.0, patience: int = 0) -> None:
        self.target_accuracy, self.patience = target_accuracy, patience
        self.reason = ""
        self._best = -1.0
        self._since_best = 0
        self._taken: set[int] = set()

    def __call__(self, report: RoundReport) -> bool:
        """Take a round's report and say whether the run ends."""
        if report.fairness is not None:
            return self.take(report.round, report.fairness.mean)
        # What round 1 begins with is no result of the run.
        received = report.received if report.round > 1 else None
        return self.take(report.round - 1, None if received is None else received.mean)

    def take(self, server_round: int, mean: float | None) -> bool:
        """Take a round's mean accuracy, once; rounds without evaluation (None) count for nothing."""
        if mean is None or server_round in self._taken:
            return False
        self._taken.add(server_round)
        if mean > self._best:
            self._best, self._since_best = mean, 0
        else:
            self._since_best += 1
        if self.target_accuracy and mean >= self.target_accuracy:
            self.reason = f"mean accuracy {mean:.3f} reached the target {self.target_accuracy:g}"
        elif self.patience and self._since_best >= self.patience:
            self.reason = f"no better mean accuracy than {self._best:.3f} in {self.patience} evaluations"
        return bool(self.reason)
