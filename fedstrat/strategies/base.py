"""FedStrategy: the Flower Strategy that all algorithms share. All plumbing, no mathematics.

An algorithm overrides the pure functions of :class:`fedstrat.strategies.algorithm.ServerHalf`, whose caller this is.
"""

import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedstrat.aggregation.device import products_on
from fedstrat.aggregation.mean import aggregate_buffers, moved, normalised
from fedstrat.errors import ConfigError, RunFailedError
from fedstrat.flower import in_order
from fedstrat.local.device import choose_device
from fedstrat.metrics.fairness import Fairness, fairness
from fedstrat.payloads import (
    Layout,
    Params,
    decode,
    is_finite,
    to_arrays,
)
from fedstrat.privacy import NO_DELTAS, check_equal_weights, check_private, wrapper_around
from fedstrat.strategies import cohort, intake
from fedstrat.strategies.algorithm import ServerHalf, State, Up
from fedstrat.strategies.arguments import CommonArguments
from fedstrat.strategies.measure import measured
from fedstrat.strategies.messages import Outbox
from fedstrat.strategies.metrics import fairness_metrics, log_summary, mean_record
from fedstrat.strategies.rounds import Abilities, RoundLoop
from fedstrat.strategies.state import Clients, Snapshot, pack_state, unpack_state

logger = logging.getLogger("flwr")

T = TypeVar("T")

_MOST_NAMED = 10
"""Clients that an error names for one reason."""


class FedStrategy(ServerHalf[State, Up], Strategy):
    """A Flower Strategy whose algorithm is three pure functions of frozen state.

    Takes every argument of ``flwr.serverapp.strategy.FedAvg`` under its own name and meaning. Differs from it on
    purpose: replies that can't be used are dropped with one log line each instead of ending the run, rounds without
    enough good replies leave everything as it was, replies are summed in the order of client ids, integer buffers
    keep their dtype, and the caller's configs are never written to.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.check_settings()
        if self.update_dtype != "model" and not self.sends_model:
            raise ConfigError(
                f"{type(self).__name__}: update_dtype = '{self.update_dtype}' rounds the models that clients send, but"
                " here they send parts of them; use 'model'"
            )
        if self.streaming and not self.steps_by_mean:
            raise ConfigError(
                f"{type(self).__name__} can't run with streaming=True: its step reads more of the updates than their"
                " example-weighted mean, so it needs all of them at once; leave streaming off"
            )
        if self.fraction_train == 0.0:
            self.min_train_nodes = 0
            logger.warning("fraction_train is set to 0.0. Federated training will be skipped.")
        if self.fraction_evaluate == 0.0:
            self.min_evaluate_nodes = 0
            logger.warning("fraction_evaluate is set to 0.0. Federated evaluation will be skipped.")
        self.products_device = choose_device(self.aggregation_device, "aggregation_device")
        if self.products_device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"aggregation_device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', but got '{self.aggregation_device}';"
                " products are worked out in float64, which not every device has"
            )
        self.reset()

    # --- what the plumbing remembers ----------------------------------------------------------------------

    def reset(self) -> None:
        """Forget the run: the next round begins a new experiment."""
        self.experiment_id = uuid.uuid4().hex
        self.state: State | None = None
        self.layout: Layout | None = None
        self.buffers: Params = {}
        self.moving: set[str] = set()
        self.arrays: ArrayRecord | None = None
        self.accepted: dict[str, int] = {}
        self.seen: set[str] = set()
        self.roster = cohort.Roster()
        self.failed_rounds = 0
        # About the last round:
        self.failed: dict[str, str] = {}
        self.trained: tuple[str, ...] = ()
        self.counts: dict[str, tuple[int, float, int]] | None = None
        self.fairness: Fairness | None = None
        self.personal: Fairness | None = None
        self.elsewhere: Fairness | None = None
        self.received: Fairness | None = None
        self._asked_received = False
        self.diagnostics: dict[str, float] = {}
        self.layers: dict[str, dict[str, float]] = {}
        self._sent: list[Message] = []
        self.wrapper: str | None = None
        self.measures = False

    def _adopt(self, arrays: ArrayRecord) -> State:
        """Take ``arrays`` as the global model; a wrapper (such as Flower's DP ones) may have changed them."""
        if self.state is None or self.layout is None:
            tensors = decode(arrays, self.arrayrecord_key)
            self.layout = Layout.of(tensors, self.trainable)
            params, self.buffers = self.layout.split(tensors)
            self.state = self.init_state(params)
        elif arrays is not self.arrays:
            params, self.buffers = self.layout.split(decode(arrays, self.arrayrecord_key))
            handed_out = self.evaluated(self.state)
            if handed_out is not self.state.params:
                # Another model than x was handed out: x moves by what the wrapper added to it.
                change = {n: p.double() - handed_out[n].double() for n, p in params.items()}
                params = moved(self.state.params, change)
            self.state = dataclasses.replace(self.state, params=params)
        self.arrays = arrays
        return self.state

    def _check_wrapper(self) -> None:
        self.wrapper = wrapper_around()
        if self.wrapper is None:
            return
        why_not = self.refuses_privacy
        if why_not is None and self.settings().get("server_lr", 1.0) != 1.0:
            why_not = "server_lr scales the step, which the wrapper's noise doesn't know; use server_lr=1.0"
        if why_not is None and self.update_dtype != "model":
            why_not = NO_DELTAS
        model = cast("Layout", self.layout).join(cast("State", self.state).params, self.buffers)
        check_private(self.wrapper, type(self).__name__, why_not, model)

    def _meet(self, grid: Grid, share: float, smallest: int) -> tuple[dict[int, str], int]:
        nodes, size, met = self.roster.meet(
            grid,
            lambda connected: max(int(connected * share), smallest),
            minimum=self.min_available_nodes,
            timeout=self.connect_timeout,
            ask=self.seed is not None or self.stateful_clients,
            need_examples=self.need_examples,
        )
        if self.state is not None:
            self.state = self._admitted(met)
            self.seen.update(met)
        return nodes, size

    def _admitted(self, clients: Clients) -> State:
        """The state after these clients were seen."""
        new = {client: examples for client, examples in clients.items() if client not in self.seen}
        state = cast("State", self.state)
        return self.admit(state, new) if new else state

    # --- Flower's Strategy: training ------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw a cohort and build its messages."""
        self.trained, self.failed, self.diagnostics, self.layers, self.received = (), {}, {}, {}, None
        self._asked_received = bool(config.get("fedstrat.evaluate-in-train"))
        if self.fraction_train == 0.0:
            return []
        self._adopt(arrays)
        self._check_wrapper()
        nodes, size = self._meet(grid, self.fraction_train, self.min_train_nodes)
        chosen = cohort.draw(nodes, size, self.seed, "cohort", server_round)
        shares = cohort.stragglers(chosen, self.straggler_share, self.seed, server_round)
        if self.drop_stragglers:
            chosen = [node for node in chosen if node not in shares]
        logger.info("configure_train: Sampled %s nodes (out of %s)", len(chosen), len(nodes))
        outbox = Outbox(self, server_round, arrays, config)
        self._sent = [outbox.message(node, nodes[node], shares.get(node)) for node in chosen]
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, take the algorithm's step over the good ones.

        Args:
            server_round: The round.
            replies: The answers to the messages of :meth:`configure_train`; with ``streaming`` in the order of these,
                and each is let go of before the next is asked for.

        Raises:
            RunFailedError: ``max_failed_rounds`` rounds in a row brought no step, or a client trains others
                parameters than the strategy expects.
        """
        return self._step(server_round, self._take_in(server_round, replies))

    def _step(self, server_round: int, taken: intake.Intake) -> tuple[ArrayRecord | None, MetricRecord | None]:
        self.trained, self.diagnostics, self.layers = (), {}, {}
        contents, updates = taken.contents, taken.updates
        if self._asked_received:
            self.received = fairness(intake.read_received(contents, updates, server_round, self._keys))
        if len(updates) < self.min_replies:
            return self._no_step(server_round, f"{len(updates)} usable replies, expected at least {self.min_replies}")
        if self.wrapper is not None:
            check_equal_weights(self.wrapper, [u.num_examples for u in updates], self.weighted_by_key)
        met = {u.client: u.num_examples for u in updates}
        before = self._admitted(met)
        with torch.no_grad():
            summands = taken.summands()
            try:
                after = self._on_device(server_round, "the step", partial(self.aggregate, before, summands))
            except (torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                why = f"an update may be too large (max_update_norm bounds them): {error}"
                return self._no_step(server_round, f"the step can't be computed; {why}")
            weights = normalised([u.num_examples for u in summands])
            buffers = aggregate_buffers(self.buffers, [u.buffers for u in summands], weights)
        broken = [name for name, p in after.params.items() if not is_finite(p)]
        if broken and self._unchecked and taken.drop_non_finite(self.arrayrecord_key, server_round):
            return self._step(server_round, taken)
        if broken:
            return self._no_step(server_round, f"the step would make '{broken[0]}' NaN or infinite; it wasn't taken")
        if self.measures and self.wrapper is None and not self.streaming:  # a wrapper's noise doesn't cover these
            numbers, self.layers = self._on_device(
                server_round, "the diagnostics", partial(measured, self, before, updates)
            )
            self.note(**numbers)
        self.moving |= {n for n, b in buffers.items() if not torch.equal(b, self.buffers[n])}
        self.state, self.buffers = after, buffers
        self.seen.update(met)
        self.arrays = self.encode(self.evaluated(after), buffers)
        self.trained = tuple(u.client for u in updates)
        self.accepted.update(dict.fromkeys(self.trained, server_round))
        self.failed_rounds = 0
        metrics = (self.train_metrics_aggr_fn or mean_record)(contents, self.weighted_by_key)
        for counted in () if self.train_metrics_aggr_fn else intake.RECEIVED:
            metrics.pop(counted, None)
        return self.arrays, metrics

    def _on_device(self, server_round: int, part: str, work: Callable[[], T]) -> T:
        """Do pure work with its inner products on ``aggregation_device``; on the CPU where they fail there.

        Args:
            server_round: The round.
            part: What the work is, for the log.
            work: It.
        """
        if self.products_device.type == "cpu":
            return work()
        try:
            with products_on(self.products_device):
                return work()
        except RuntimeError as error:  # memory that clients took, a driver that went away; or the work's own
            why = str(error)
        done = work()  # raises what isn't the device's fault
        logger.warning(
            "round %d: aggregation_device = '%s' failed, so the CPU worked out %s: %s",
            server_round,
            self.aggregation_device,
            part,
            why,
        )
        return done

    @property
    def _unchecked(self) -> frozenset[str]:
        """Parameters of replies that are searched for NaN and infinity only where the step came out so."""
        # Clipping reads all numbers anyway, a wrapper's weights are looked at before the step, and what is in a running
        # mean can't be taken out again.
        at_once = self.max_update_norm is not None or self.wrapper is not None or self.streaming
        waits = self.shows_non_finite and not at_once
        return frozenset(cast("Layout", self.layout).trainable if waits else ())

    def _take_in(self, server_round: int, replies: Iterable[Message]) -> intake.Intake:
        expected = intake.Expected(
            server_round=server_round,
            layout=cast("Layout", self.layout),
            keys=self._keys,
            payload=self.payload,
            needs=self.asks,
            buffers=None if self.sends_model else self.buffers,
            unchecked=self._unchecked,
            check=self.check_update,
            rounded=self._rounded(),
        )
        params, longest = cast("State", self.state).params, self.max_update_norm if self.sends_model else None
        in_turn = self.streaming and isinstance(replies, Iterator)
        pair = self.roster.senders_in_turn if in_turn else self.roster.senders
        taken = intake.Intake(mean=intake.MeanUpdate(params, self.buffers) if self.streaming else None)
        for update, content in intake.good(pair(self._sent, replies), expected, taken):
            shortened = update if longest is None else intake.clip_update(update, params, longest, server_round)
            taken.keep(shortened, content)
        received = len(taken.answered) - taken.errors
        logger.info("aggregate_train: Received %s results and %s failures", received, taken.errors)
        answered = set(taken.answered)
        silent = [m.metadata.dst_node_id for m in self._sent if m.metadata.message_id not in answered]
        for client in in_order(self.roster.client_of(node) for node in silent):
            if client in taken.failed:
                continue  # it did send something
            taken.failed[client] = "no reply in time"
            logger.warning("round %d: client %s is dropped: no reply in time", server_round, client)
        for client in taken.lost:
            self.accepted.pop(client, None)
            self.state = self.forget(cast("State", self.state), client)
        self._sent, self.failed = [], taken.failed
        return taken

    def _rounded(self) -> intake.Rounded | None:
        if self.update_dtype == "model":
            return None
        return intake.Rounded(cast("State", self.state).params, self.buffers, getattr(torch, self.update_dtype))

    @property
    def _keys(self) -> intake.Keys:
        return intake.Keys(self.arrayrecord_key, self.weighted_by_key)

    def _no_step(self, server_round: int, why: str) -> tuple[None, None]:
        self.failed_rounds += 1
        logger.warning("round %d: no update (%s); model and state stay as they were", server_round, why)
        if self.failed_rounds >= self.max_failed_rounds:
            raise RunFailedError(
                f"{self.failed_rounds} failed round{'s' * (self.failed_rounds > 1)} in a row, the last in"
                f" round {server_round}: {why}; {self.failure_reasons()}"
            )
        return None, None

    def failure_reasons(self) -> str:
        """The clients' own reasons of the last round in one line, each followed by the first clients that gave it."""
        grouped: dict[str, list[str]] = {}
        for client, reason in self.failed.items():
            grouped.setdefault(reason, []).append(client)
        return "; ".join(f"{reason} ({_listed(clients)})" for reason, clients in grouped.items()) or "no reply"

    def encode(self, params: Params, buffers: Params) -> ArrayRecord:
        """The whole model as an ArrayRecord."""
        return to_arrays(cast("Layout", self.layout).join(params, buffers))

    # --- Flower's Strategy: evaluation ----------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the nodes that evaluate the global model and build their messages."""
        self.counts = self.fairness = self.personal = self.elsewhere = None
        if self.fraction_evaluate == 0.0:
            return []
        nodes, size = self._meet(grid, self.fraction_evaluate, self.min_evaluate_nodes)
        chosen = cohort.draw(nodes, size, self.seed, "evaluate", server_round)
        logger.info("configure_evaluate: Sampled %s nodes (out of %s)", len(chosen), len(nodes))
        own: dict[str, Any] = {"server-round": server_round, "fedstrat.experiment-id": self.experiment_id}
        shared = ConfigRecord({**config, **own})
        self._sent = []
        for node in chosen:
            record = shared
            if self.evaluate_personal:
                accepted = self.accepted.get(nodes[node], 0)
                record = ConfigRecord(
                    {**shared, "fedstrat.evaluate-personal": True, "fedstrat.accepted-round": accepted}
                )
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: record})
            self._sent.append(Message(content, node, MessageType.EVALUATE, group_id=str(server_round)))
        return self._sent

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Add up counts and losses over clients; ratios are taken last."""
        replies = list(replies)
        pairs = self.roster.senders(self._sent, replies)
        contents, counts, personal, elsewhere = intake.read_evaluations(pairs, server_round, self._keys)
        self._sent = []
        logger.info(
            "aggregate_evaluate: Received %s results and %s failures",
            len(contents),
            len(replies) - len(contents),
        )
        if not contents:
            return None
        self.counts, self.fairness = counts or None, fairness(counts)
        self.personal, self.elsewhere = fairness(personal), fairness(elsewhere)
        metrics = mean_record(contents, self.weighted_by_key)
        if isinstance(sharpness := metrics.pop("sharpness", None), float):
            self.note(sharpness=sharpness)  # a diagnostic of ours, not a metric of the run
        if self.evaluate_metrics_aggr_fn:
            return self.evaluate_metrics_aggr_fn(contents, self.weighted_by_key)
        summaries = {"": self.fairness, "personal-": self.personal, "personal-elsewhere-": self.elsewhere}
        for prefix, scores in summaries.items():
            if scores is not None:
                for counted in ("num-correct", "loss-sum"):
                    metrics.pop(prefix + counted, None)
                metrics.update(fairness_metrics(scores, prefix))
        for counted in ("num-examples", "loss"):  # elsewhere only correct answers are counted
            metrics.pop(f"personal-elsewhere-{counted}", None)
        return metrics

    # --- checkpoints ----------------------------------------------------------------------------------------

    def snapshot(self, server_round: int) -> Snapshot:
        """Everything that the next rounds depend on, after ``server_round``."""
        state, layout = cast("State", self.state), cast("Layout", self.layout)
        tensors, numbers = pack_state(state)
        return Snapshot(
            round=server_round,
            algorithm=self.algorithm,
            experiment_id=self.experiment_id,
            settings={n: v for n, v in self.settings().items() if isinstance(v, bool | int | float | str)},
            model=layout.join(state.params, self.buffers),
            trainable=layout.trainable,
            tensors=tensors,
            numbers=numbers,
            accepted=dict(self.accepted),
            seen=tuple(in_order(self.seen)),
            moving=tuple(sorted(self.moving)),
        )

    def restore(self, snapshot: Snapshot) -> ArrayRecord:
        """Become what :meth:`snapshot` saw, and return the global model.

        Raises:
            StateError: The snapshot is of another algorithm, or of other settings; names the first that differs.
        """
        snapshot.check(self.algorithm, self.settings())
        self.reset()
        self.experiment_id = snapshot.experiment_id
        self.layout = Layout.of(snapshot.model, snapshot.trainable)
        params, self.buffers = self.layout.split(snapshot.model)
        self.state = unpack_state(self.init_state(params), snapshot.tensors, snapshot.numbers)
        self.accepted, self.seen, self.moving = dict(snapshot.accepted), set(snapshot.seen), set(snapshot.moving)
        self.arrays = self.encode(self.evaluated(self.state), self.buffers)
        return self.arrays

    # --- the run --------------------------------------------------------------------------------------------

    def summary(self) -> None:
        """Log the strategy's settings."""
        own = {name: value for name, value in self.settings().items() if name not in CommonArguments.hypers}
        log_summary(self, type(self).__name__, own)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        **abilities: Any,
    ) -> Result:
        """Run ``num_rounds`` rounds, as Flower's own ``start`` does.

        Args:
            grid: Where the nodes are.
            initial_arrays: The initial model, x_0.
            num_rounds: Number of rounds.
            timeout: Seconds that a round waits for replies, where ``round_timeout`` doesn't say.
            train_config: Sent with every training message.
            evaluate_config: Sent with every evaluation message.
            evaluate_fn: Evaluates the global model on the server, before round 1 and after every round.
            **abilities: See :class:`fedstrat.strategies.rounds.Abilities`: ``on_round``, ``evaluate_every``,
                ``should_end``, ``checkpoints``, ``resume``, ``diagnostics``.

        Returns:
            Flower's Result; ``arrays`` is the last good model, also when rounds failed.

        Raises:
            RunFailedError: Too few nodes, ``max_failed_rounds`` failed rounds in a row, or no round succeeded.
                Its ``result`` holds the last good model.
        """
        rounds = RoundLoop(
            strategy=self,
            grid=grid,
            num_rounds=num_rounds,
            timeout=timeout,
            train_config=train_config or ConfigRecord(),
            evaluate_config=evaluate_config or ConfigRecord(),
            evaluate_fn=evaluate_fn,
            abilities=Abilities(**abilities),
        )
        return rounds.run(initial_arrays)


def _listed(clients: list[str]) -> str:
    named, others = clients[:_MOST_NAMED], len(clients) - _MOST_NAMED
    rest = f" and {others} other{'s' * (others > 1)}" if others > 0 else ""
    return f"client{'s' * (len(clients) > 1)} {', '.join(named)}{rest}"
