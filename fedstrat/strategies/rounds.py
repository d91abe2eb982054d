"""The round loop behind ``strategy.start``: exchange, step, evaluate, report."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedstrat.errors import RunFailedError
from fedstrat.flower import exchange
from fedstrat.metrics.rounds import RoundReport, Traffic
from fedstrat.metrics.traffic import count

if TYPE_CHECKING:
    from fedstrat.strategies.base import FedStrategy

logger = logging.getLogger("flwr")

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]


def run_rounds(
    strategy: "FedStrategy[Any, Any]",
    grid: Grid,
    initial_arrays: ArrayRecord,
    *,
    num_rounds: int,
    timeout: float,
    train_config: ConfigRecord,
    evaluate_config: ConfigRecord,
    evaluate_fn: EvaluateFunction | None,
    on_round: Callable[[RoundReport], None] | None = None,
    evaluate_every: int = 1,
) -> Result:
    """Run the rounds of a strategy.

    Args:
        strategy: Whose rounds.
        grid: Where the nodes are.
        initial_arrays: The initial model.
        num_rounds: Number of rounds.
        timeout: Seconds that a round waits for replies, where the strategy's ``round_timeout`` doesn't say.
        train_config: Sent with every training message.
        evaluate_config: Sent with every evaluation message.
        evaluate_fn: Evaluates the global model on the server.
        on_round: Called with every round's report.
        evaluate_every: Evaluate on the clients after every so many rounds, and after the last.

    Raises:
        RunFailedError: See ``FedStrategy.start``.
    """
    strategy.reset()
    logger.info("Starting %s strategy:", type(strategy).__name__)
    strategy.summary()
    result = Result(arrays=initial_arrays)
    if evaluate_fn is not None:
        _keep(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, initial_arrays))
    succeeded = 0
    for server_round in range(1, num_rounds + 1):
        begun = time.monotonic()
        logger.info("[ROUND %s/%s]", server_round, num_rounds)
        deadline = _timeout(strategy, server_round, timeout)
        traffic: dict[str, tuple[int, int]] = {}
        strategy.counts = strategy.fairness = None
        failure: RunFailedError | None = None
        try:
            arrays, metrics = None, None
            sent, replies = _exchange(
                grid, strategy.configure_train(server_round, result.arrays, train_config, grid), deadline
            )
            traffic |= {"train_down": _count(sent), "train_up": _count(replies)}
            if sent:
                arrays, metrics = strategy.aggregate_train(server_round, replies)
            result.arrays = arrays or result.arrays
            succeeded += arrays is not None
            _keep(result.train_metrics_clientapp, server_round, metrics)

            if server_round % max(evaluate_every, 1) == 0 or server_round == num_rounds:
                sent, replies = _exchange(
                    grid,
                    strategy.configure_evaluate(server_round, result.arrays, evaluate_config, grid),
                    deadline,
                )
                traffic |= {"evaluate_down": _count(sent), "evaluate_up": _count(replies)}
                if sent:
                    evaluated = strategy.aggregate_evaluate(server_round, replies)
                    _keep(result.evaluate_metrics_clientapp, server_round, evaluated)
            if evaluate_fn is not None:
                _keep(result.evaluate_metrics_serverapp, server_round, evaluate_fn(server_round, result.arrays))
            if server_round == num_rounds and succeeded == 0 and strategy.fraction_train > 0.0:
                raise RunFailedError(f"no round of {num_rounds} succeeded: {strategy.failure_reasons()}")
        except RunFailedError as error:
            error.result = result  # the last good model is never lost
            failure = error
        if on_round is not None:
            seconds = time.monotonic() - begun
            on_round(_report(strategy, result, server_round, num_rounds, seconds, _traffic(traffic)))
        if failure is not None:
            raise failure
    return result


def _exchange(grid: Grid, messages: Any, timeout: float) -> tuple[list[Message], list[Message]]:
    sent = list(messages)
    return sent, exchange(grid, sent, timeout)


def _timeout(strategy: "FedStrategy[Any, Any]", server_round: int, default: float) -> float:
    own = strategy.round_timeout
    if isinstance(own, list):
        own = own[min(server_round, len(own)) - 1] if own else None
    return own or default


def _keep(metrics: dict[int, MetricRecord], server_round: int, record: MetricRecord | None) -> None:
    if record is not None:
        metrics[server_round] = record


def _count(messages: list[Message]) -> tuple[int, int]:
    counts = [count(message.content) for message in messages if message.has_content()]
    return sum(payload for payload, _ in counts), sum(wire for _, wire in counts)


def _traffic(counts: dict[str, tuple[int, int]]) -> Traffic:
    nothing = (0, 0)
    down_payload, down_wire = counts.get("train_down", nothing)
    up_payload, up_wire = counts.get("train_up", nothing)
    return Traffic(
        train_down_payload=down_payload,
        train_up_payload=up_payload,
        train_down_wire=down_wire,
        train_up_wire=up_wire,
        evaluate_down_wire=counts.get("evaluate_down", nothing)[1],
        evaluate_up_wire=counts.get("evaluate_up", nothing)[1],
    )


def _report(
    strategy: "FedStrategy[Any, Any]",
    result: Result,
    server_round: int,
    num_rounds: int,
    seconds: float,
    traffic: Traffic,
) -> RoundReport:
    def floats(metrics: dict[int, MetricRecord]) -> dict[str, float]:
        return {k: float(v) for k, v in metrics.get(server_round, {}).items() if isinstance(v, int | float)}

    return RoundReport(
        round=server_round,
        num_rounds=num_rounds,
        seconds=seconds,
        aggregated=bool(strategy.trained),
        trained=strategy.trained,
        failed=dict(strategy.failed),
        train=floats(result.train_metrics_clientapp),
        diagnostics=dict(strategy.diagnostics),
        counts=strategy.counts,
        fairness=strategy.fairness,
        server=floats(result.evaluate_metrics_serverapp),
        traffic=traffic,
    )
