"""The round loop behind ``strategy.start``: exchange, step, evaluate, report, save."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedstrat.errors import RunFailedError
from fedstrat.flower import exchange, exchange_in_turn
from fedstrat.metrics.rounds import RoundReport, Traffic
from fedstrat.metrics.traffic import array_payload_bytes, count
from fedstrat.strategies.metrics import fairness_metrics, log_end, log_start
from fedstrat.strategies.state import Snapshot

if TYPE_CHECKING:
    from fedstrat.strategies.base import FedStrategy

logger = logging.getLogger("flwr")

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]
_RECORDS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class Checkpoints(Protocol):
    """Where snapshots go; see ``fedstrat.runs.checkpoint``."""

    def due(self, server_round: int, *, every_round: bool, last: bool) -> bool:
        """Whether this round is saved."""

    def save(self, snapshot: Snapshot) -> None:
        """Save a snapshot atomically."""


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What ``strategy.start`` takes beyond Flower's arguments, all by keyword.

    Attributes:
        on_round: Called with every round's report, also with that of a round that ends the run.
        evaluate_every: Evaluate on the clients after every so many rounds, and after the last. With the strategy's
            ``evaluate_in_train`` all but the last of these take place in the training of the next round.
        should_end: Asked after every round whether the run has reached its goal.
        checkpoints: Where rounds are saved, each before it is acknowledged to the clients.
        resume: Go on after this snapshot, instead of from ``initial_arrays``.
        diagnostics: Numbers that explain results and never change them, in the reports: "light" tells every round how
            far the updates agree and the sharpness of the final model, "full" the sharpness at every evaluation.
    """

    on_round: Callable[[RoundReport], None] | None = None
    evaluate_every: int = 1
    should_end: Callable[[RoundReport], bool] | None = None
    checkpoints: Checkpoints | None = None
    resume: Snapshot | None = None
    diagnostics: Literal["off", "light", "full"] = "light"


@dataclass(kw_only=True)
class RoundLoop:
    """One run of a strategy.

    Attributes:
        strategy: Whose rounds.
        grid: Where the nodes are.
        num_rounds: Number of rounds.
        timeout: Seconds that a round waits for replies, where the strategy's ``round_timeout`` doesn't say.
        train_config: Sent with every training message.
        evaluate_config: Sent with every evaluation message.
        evaluate_fn: Evaluates the global model on the server.
        abilities: The rest.
    """

    strategy: "FedStrategy[Any, Any]"
    grid: Grid
    num_rounds: int
    timeout: float
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFunction | None
    abilities: Abilities

    def run(self, initial_arrays: ArrayRecord) -> Result:
        """Run all rounds.

        Raises:
            RunFailedError: See ``FedStrategy.start``.
            StateError: ``resume`` is of another run, or a checkpoint can't be written.
        """
        begun = time.monotonic()
        strategy, resume = self.strategy, self.abilities.resume
        if resume is None:
            strategy.reset()
            self.result = Result(arrays=initial_arrays)
        else:
            self.result = Result(arrays=strategy.restore(resume))
            for name, records in resume.metrics.items():
                getattr(self.result, name).update({int(t): MetricRecord(dict(r)) for t, r in records.items()})
        strategy.measures = self.abilities.diagnostics != "off"
        logger.info("Starting %s strategy:", type(strategy).__name__)
        log_start(self.num_rounds, initial_arrays, self.train_config, self.evaluate_config)
        strategy.summary()
        logger.info("")
        if resume is None:
            self._evaluate_on_server(0)
        self.succeeded = len(self.result.train_metrics_clientapp)
        for server_round in range(resume.round + 1 if resume else 1, self.num_rounds + 1):
            if self._round(server_round):
                break
        log_end(time.monotonic() - begun, self.result)
        return self.result

    def _round(self, server_round: int) -> bool:
        """Run one round; returns whether the run ends here."""
        begun = time.monotonic()
        logger.info("")
        logger.info("[ROUND %s/%s]", server_round, self.num_rounds)
        self._traffic: dict[str, tuple[int, int]] = {}
        self._dense = 0
        failure: RunFailedError | None = None
        ends, last = False, server_round == self.num_rounds
        try:
            self._train(server_round)
            self._evaluate(server_round, last=last)
            self._evaluate_on_server(server_round)
            if last and not self.succeeded and self.strategy.fraction_train > 0.0:
                raise RunFailedError(f"no round of {self.num_rounds} succeeded: {self.strategy.failure_reasons()}")
            goal = self.abilities.should_end
            ends = goal is not None and goal(self._report(server_round, time.monotonic() - begun))
            if ends and not last and (self.strategy.evaluate_in_train or self.strategy.evaluate_personal):
                # No next round's training evaluates this model, and what is asked for in the end is asked for now.
                before = self.strategy.counts, self.strategy.fairness, self.strategy.personal
                self._evaluate(server_round, last=True)
                if self.strategy.fairness is None:  # nobody answered
                    self.strategy.counts, self.strategy.fairness, self.strategy.personal = before
        except RunFailedError as error:
            error.result = self.result  # the last good model is never lost
            failure = error
        report = self._report(server_round, time.monotonic() - begun)
        if self.abilities.on_round is not None:
            self.abilities.on_round(report)
        if failure is not None:
            raise failure
        self._save(server_round, last=ends or last)
        return ends

    def _train(self, server_round: int) -> None:
        arrays, config = self.result.arrays, self.train_config
        in_train = self.strategy.evaluate_in_train and self._due(server_round - 1)
        if in_train:
            config = ConfigRecord({**config, "fedstrat.evaluate-in-train": True})
        messages = self.strategy.configure_train(server_round, arrays, config, self.grid)
        sent, replies = self._exchange("train", messages, server_round)
        self._dense = 2 * len(sent) * sum(array_payload_bytes(array) for array in arrays.values())
        if sent:
            new, metrics = self.strategy.aggregate_train(server_round, replies)
            _log_aggregated(metrics)
            self.succeeded += new is not None
            self.result.arrays = arrays if new is None else new
            _keep(self.result.train_metrics_clientapp, server_round, metrics)
            received = self.strategy.received
            if received is not None and server_round - 1 not in self.result.evaluate_metrics_clientapp:
                record = MetricRecord(dict(fairness_metrics(received)))
                _keep(self.result.evaluate_metrics_clientapp, server_round - 1, record)
            if in_train and received is None:
                logger.warning("round %d: no client told how it does on the received model", server_round)

    def _due(self, server_round: int) -> bool:
        return server_round % max(self.abilities.evaluate_every, 1) == 0

    def _evaluate(self, server_round: int, *, last: bool) -> None:
        self.strategy.counts = self.strategy.fairness = self.strategy.personal = self.strategy.elsewhere = None
        if not last and (self.strategy.evaluate_in_train or not self._due(server_round)):
            return
        config = self.evaluate_config
        if self.strategy.evaluate_personal and last:
            # Once, since it costs more than all other evaluation: how personal models do on others' data.
            config = ConfigRecord({**config, "fedstrat.generalisation": True})
        if self.abilities.diagnostics == "full" or (self.strategy.measures and last):
            config = ConfigRecord({**config, "fedstrat.sharpness": True})
        messages = self.strategy.configure_evaluate(server_round, self.result.arrays, config, self.grid)
        sent, replies = self._exchange("evaluate", messages, server_round)
        if sent:
            metrics = self.strategy.aggregate_evaluate(server_round, replies)
            _log_aggregated(metrics)
            _keep(self.result.evaluate_metrics_clientapp, server_round, metrics)

    def _evaluate_on_server(self, server_round: int) -> None:
        if self.evaluate_fn is not None:
            if server_round:
                logger.info("Global evaluation")
            metrics = self.evaluate_fn(server_round, self.result.arrays)
            line = "\t└──> MetricRecord: %s" if server_round else "Initial global evaluation results: %s"
            logger.info(line, metrics)
            _keep(self.result.evaluate_metrics_serverapp, server_round, metrics)

    def _exchange(
        self, phase: str, messages: Iterable[Message], server_round: int
    ) -> tuple[list[Message], Iterable[Message]]:
        sent = list(messages)
        own = self.strategy.round_timeout
        if isinstance(own, list):
            own = own[min(server_round, len(own)) - 1] if own else None
        self._add_traffic(f"{phase}_down", sent)
        if phase == "train" and self.strategy.streaming:
            return sent, self._in_turn(sent, own or self.timeout)
        replies = exchange(self.grid, sent, own or self.timeout)
        self._add_traffic(f"{phase}_up", replies)
        return sent, replies

    def _in_turn(self, sent: list[Message], timeout: float) -> Iterator[Message]:
        for reply in exchange_in_turn(self.grid, sent, timeout):
            self._add_traffic("train_up", [reply])
            yield reply

    def _add_traffic(self, way: str, travelled: list[Message]) -> None:
        before, now = self._traffic.get(way, (0, 0)), _count(travelled)
        self._traffic[way] = before[0] + now[0], before[1] + now[1]

    def _save(self, server_round: int, *, last: bool) -> None:
        # The next broadcast acknowledges this round: clients commit their state only once this is on disk.
        checkpoints = self.abilities.checkpoints
        if checkpoints is None or self.strategy.state is None:
            return
        # Personal models are pending at the clients, too.
        every_round = self.strategy.stateful_clients or self.strategy.evaluate_personal
        if checkpoints.due(server_round, every_round=every_round, last=last):
            metrics = {
                name: {str(t): dict(record) for t, record in getattr(self.result, name).items()} for name in _RECORDS
            }
            checkpoints.save(dataclasses.replace(self.strategy.snapshot(server_round), metrics=metrics))

    def _report(self, server_round: int, seconds: float) -> RoundReport:
        def floats(metrics: dict[int, MetricRecord]) -> dict[str, float]:
            return {k: float(v) for k, v in metrics.get(server_round, {}).items() if isinstance(v, int | float)}

        strategy, nothing = self.strategy, (0, 0)
        down, up = self._traffic.get("train_down", nothing), self._traffic.get("train_up", nothing)
        return RoundReport(
            round=server_round,
            num_rounds=self.num_rounds,
            seconds=seconds,
            aggregated=bool(strategy.trained),
            trained=strategy.trained,
            failed=dict(strategy.failed),
            train=floats(self.result.train_metrics_clientapp),
            diagnostics=dict(strategy.diagnostics),
            layers=strategy.layers,
            counts=strategy.counts,
            fairness=strategy.fairness,
            personal=strategy.personal,
            elsewhere=strategy.elsewhere,
            received=strategy.received,
            server=floats(self.result.evaluate_metrics_serverapp),
            traffic=Traffic(
                train_down_payload=down[0],
                train_up_payload=up[0],
                train_down_wire=down[1],
                train_up_wire=up[1],
                evaluate_down_wire=self._traffic.get("evaluate_down", nothing)[1],
                evaluate_up_wire=self._traffic.get("evaluate_up", nothing)[1],
                train_dense_payload=self._dense,
            ),
        )


def _log_aggregated(metrics: MetricRecord | None) -> None:
    if metrics is not None:
        logger.info("\t└──> Aggregated MetricRecord: %s", metrics)


def _keep(metrics: dict[int, MetricRecord], server_round: int, record: MetricRecord | None) -> None:
    if record is not None:
        metrics[server_round] = record


def _count(messages: list[Message]) -> tuple[int, int]:
    counts = [count(message.content) for message in messages if message.has_content()]
    return sum(payload for payload, _ in counts), sum(wire for _, wire in counts)
