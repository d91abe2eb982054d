"""The arguments that every Strategy takes: Flower's own under their own names, and those of our plumbing."""

from collections.abc import Callable
from typing import Any, Literal

from flwr.app import MetricRecord, RecordDict

from fedstrat.strategies.settings import Configured, hyper

MetricsFunction = Callable[[list[RecordDict], str], MetricRecord]


class CommonArguments(Configured):
    """Flower's ``FedAvg`` arguments (to ``evaluate_metrics_aggr_fn``), then ours."""

    fraction_train: float = hyper(default=1.0, ge=0.0, le=1.0, doc="share of the nodes that train in a round")
    fraction_evaluate: float = hyper(default=1.0, ge=0.0, le=1.0, doc="share of the nodes that evaluate in a round")
    min_train_nodes: int = hyper(default=2, ge=0, doc="smallest number of nodes that train in a round")
    min_evaluate_nodes: int = hyper(default=2, ge=0, doc="smallest number of nodes that evaluate in a round")
    min_available_nodes: int = hyper(default=2, ge=0, doc="number of connected nodes that a round waits for")
    weighted_by_key: str = hyper(default="num-examples", doc="metric that weights clients")
    arrayrecord_key: str = hyper(default="arrays", doc="name of the model's ArrayRecord in messages")
    configrecord_key: str = hyper(default="config", doc="name of the ConfigRecord in messages")
    train_metrics_aggr_fn: MetricsFunction | None = hyper(default=None, doc="aggregates training metrics")
    evaluate_metrics_aggr_fn: MetricsFunction | None = hyper(default=None, doc="aggregates evaluation metrics")
    seed: int | None = hyper(default=None, ge=0, doc="fixes cohorts and the clients' own randomness")
    trainable: Any = hyper(default=None, doc="names of the trained parameters, or a predicate; None: see Layout.of")
    round_timeout: float | list[float] | None = hyper(default=None, doc="seconds a round waits for replies")
    connect_timeout: float | None = hyper(default=600.0, gt=0.0, doc="seconds to wait for enough nodes")
    min_replies: int = hyper(default=1, ge=1, doc="smallest number of good replies that makes a round count")
    max_failed_rounds: int = hyper(default=3, ge=1, doc="failed rounds in a row that end the run")
    max_update_norm: float | None = hyper(default=None, gt=0.0, doc="clips |y_i - x| of every client")
    streaming: bool = hyper(
        default=False, doc="add replies to a mean one by one and let go of each: memory of a few models for any cohort"
    )
    evaluate_personal: bool = hyper(default=False, doc="also evaluate each client's own trained model on its test data")
    evaluate_in_train: bool = hyper(
        default=False, doc="clients that train first evaluate the received model on their test data"
    )
    update_dtype: Literal["model", "bfloat16", "float16"] = hyper(
        default="model", doc="numbers in which clients send y_i - x in place of y_i; model: y_i as it is"
    )
    aggregation_device: str = hyper(
        default="cpu", doc="where inner products of updates are worked out: cpu, cuda, cuda:N or auto"
    )
    straggler_share: float = hyper(default=0.0, ge=0.0, le=1.0, doc="share of a cohort that runs fewer epochs")
