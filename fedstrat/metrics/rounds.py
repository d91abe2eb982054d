"""What one round says about itself: the record behind a history line and the line on the screen."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedstrat.metrics.fairness import Fairness


@dataclass(frozen=True)
class Traffic:
    """Bytes of one round, both directions apart, training and evaluation apart.

    ``payload`` is array data alone (what the papers' tables count); ``wire`` is every record as Flower counts
    it, equal objects of a message once. ``train_dense_payload`` is what FedAvg would have moved, both directions
    together: the whole model to every client that was asked to train, and back.
    """

    train_down_payload: int = 0
    train_up_payload: int = 0
    train_down_wire: int = 0
    train_up_wire: int = 0
    evaluate_down_wire: int = 0
    evaluate_up_wire: int = 0
    train_dense_payload: int = 0


@dataclass(frozen=True)
class RoundReport:
    """One finished round.

    Attributes:
        round: The round's number, from 1.
        num_rounds: How many rounds the run has.
        seconds: Wall time of the round.
        aggregated: Whether the model moved; False when too few replies could be used.
        trained: Ids of the clients whose replies were aggregated, in order.
        failed: Client id -> why its reply could not be used.
        train: Example-weighted means of the clients' training metrics.
        diagnostics: Numbers of the algorithm itself, such as CRAFT's rank, and about the updates and the model; see
            docs/report.md.
        layers: Layer -> how far the clients' updates of it agree.
        counts: Client id -> (correct, summed loss, examples) on its own test data; None when not evaluated.
        fairness: The same, summarised over clients.
        personal: The clients' personal models, each on its own test data, summarised; None where there are none.
        elsewhere: The same models, each on the other clients' test data; None but in the last round.
        received: The model of the round before, with which this one began, on the test data of the clients that trained
            in this one; None but with ``evaluate_in_train``.
        server: What ``evaluate_fn`` returned.
        traffic: Bytes on the wire.
    """

    round: int
    num_rounds: int
    seconds: float
    aggregated: bool
    trained: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    train: Mapping[str, float] = field(default_factory=dict)
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    counts: Mapping[str, tuple[int, float, int]] | None = None
    fairness: Fairness | None = None
    personal: Fairness | None = None
    elsewhere: Fairness | None = None
    received: Fairness | None = None
    server: Mapping[str, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
