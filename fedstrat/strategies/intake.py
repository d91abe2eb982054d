"""Reading replies: a reply that can't be used is data, not an exception."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedstrat import deltas
from fedstrat.aggregation.mean import RunningMean
from fedstrat.errors import PayloadError, RunFailedError
from fedstrat.flower import records
from fedstrat.naming import kebab
from fedstrat.payloads import NOTHING, Layout, Params, Payload, Update, check_finite, check_like, decode

logger = logging.getLogger("flwr")

_ELSEWHERE = "personal-elsewhere-"
_RECEIVED = "received-"
RECEIVED = tuple(_RECEIVED + counted for counted in ("num-examples", "num-correct", "loss-sum"))
"""Metrics of a training reply about the model as it was received (``evaluate_in_train``)."""
_DEAD_WORKER = re.compile(
    r"<class 'ray\.exceptions\.((?:RayActor|ActorDied|WorkerCrashed|OutOfMemory|NodeDied)Error)'>"
)
_REASON_LENGTH = 2000  # our own errors, which end with what to do, are shorter
_FLOWER_REASON = re.compile(r"<class '([^']*)'>:<['\"]?(.*?)['\"]?>")


MOST_EXAMPLES = 2.0**53
"""Up to which a float counts exactly; sums of larger numbers could overflow."""

Counts = dict[str, tuple[int, float, int]]
"""Client id -> (correct, summed loss, examples)."""


@dataclass(frozen=True)
class Keys:
    """Names of Flower's own records and of the weight, as the strategy was told."""

    arrays: str
    weight: str


@dataclass(frozen=True)
class Rounded:
    """Replies may hold ``y_i - x``, rounded, in place of the model, and the buffers that changed (``update_dtype``).

    Attributes:
        x: The parameters that the clients were sent.
        buffers: The buffers that the clients were sent.
        dtype: The displacements' dtype.
    """

    x: Params
    buffers: Params
    dtype: torch.dtype


@dataclass(frozen=True)
class Expected:
    """What a training reply must be.

    Attributes:
        server_round: The round that asked.
        layout: The global model's layout.
        keys: Record names.
        payload: What the algorithm's client half adds.
        needs: Metrics without which the algorithm can't use the reply, for example ``("lr-sum",)``.
        buffers: The present buffers, where replies hold no model but only the buffers that changed.
        unchecked: Parameters that aren't looked at for NaN and infinity, since the step shows them.
        check: The algorithm's own look at a payload; raises PayloadError.
        rounded: Set where rounded displacements are accepted in place of models.
    """

    server_round: int
    layout: Layout
    keys: Keys
    payload: type[Payload]
    needs: tuple[str, ...] = ()
    buffers: Params | None = None
    unchecked: frozenset[str] = frozenset()
    check: Callable[[Any], None] = lambda _: None
    rounded: Rounded | None = None


@dataclass(frozen=True)
class Ignored:
    """A valid reply that carries no update, and why."""

    reason: str
    lost: bool = False


class MeanUpdate:
    """The example-weighted mean of updates as one update; their tensors are let go of.

    Args:
        params: x.
        buffers: The present buffers.
    """

    def __init__(self, params: Params, buffers: Params) -> None:
        self._params, self._buffers, self._examples = RunningMean(params), RunningMean(buffers), 0.0

    def add(self, update: Update[Any], content: RecordDict) -> tuple[Update[Any], RecordDict]:
        """Add one update, and return what is left of it and of its reply: everything but tensors."""
        self._params.add(update.params, update.num_examples)
        self._buffers.add(update.buffers, update.num_examples)
        rest: dict[str, Any] = {name: record for name, record in content.items() if not isinstance(record, ArrayRecord)}
        self._examples += update.num_examples
        return replace(update, params={}, buffers={}, extra=NOTHING), RecordDict(rest)

    def update(self) -> Update[Any]:
        """The mean, in float64; what else an update tells is unknown."""
        return Update(
            client="",
            num_examples=self._examples,
            num_steps=0,
            lr_sum=math.nan,
            params=self._params.model(),
            buffers=self._buffers.model(),
            extra=NOTHING,
        )


@dataclass
class Intake:
    """The replies of a round, sorted out.

    Attributes:
        updates: The good ones, in client order.
        contents: What they came in.
        failed: Client id -> why its reply can't be used.
        lost: Clients that lost their state.
        answered: Ids of the messages that were answered.
        errors: How many replies were errors.
        mean: Where tensors are added up; ``updates`` and ``contents`` hold none then. None where they hold them.
    """

    updates: list[Update[Any]] = field(default_factory=list)
    contents: list[RecordDict] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    errors: int = 0
    mean: MeanUpdate | None = None

    def keep(self, update: Update[Any], content: RecordDict) -> None:
        """Take a good update."""
        kept, rest = (update, content) if self.mean is None else self.mean.add(update, content)
        self.updates.append(kept)
        self.contents.append(rest)

    def summands(self) -> list[Update[Any]]:
        """What the step is taken over; once, and of at least one update."""
        return self.updates if self.mean is None else [self.mean.update()]

    def drop(self, client: str, error: PayloadError, server_round: int) -> None:
        """Note why a client's reply can't be used; the first reason counts."""
        self.failed.setdefault(client, str(error))
        logger.warning("round %d: client %s is dropped: %s", server_round, client, error)

    def drop_non_finite(self, what: str, server_round: int) -> bool:
        """Drop the updates whose parameters hold NaN or infinity; returns whether there were any."""
        good = []
        for update, content in zip(self.updates, self.contents, strict=True):
            try:
                check_finite(update.params, what)
                good.append((update, content))
            except PayloadError as error:
                self.failed.pop(update.client, None)  # that of a second reply
                self.drop(update.client, error, server_round)
        dropped = len(self.updates) - len(good)
        self.updates, self.contents = [update for update, _ in good], [content for _, content in good]
        return dropped > 0


def good(
    replies: Iterable[tuple[str, Message]], expected: Expected, intake: Intake
) -> Iterator[tuple[Update[Any], RecordDict]]:
    """Read a round's training replies and yield the good ones; each that can't be used costs one log line.

    Args:
        replies: (client id, reply), in client order.
        expected: What they must be.
        intake: Where all but the good ones is noted.

    Raises:
        RunFailedError: A client trains other parameters than the strategy expects.
    """
    answered: set[str] = set()
    for client, reply in replies:
        intake.answered.append(reply.metadata.reply_to_message_id)
        intake.errors += reply.has_error()
        try:
            if client in answered:
                raise PayloadError("a second reply of this client in this round; the first counts")
            answered.add(client)
            content = content_of(reply)
            check_trainable(client, content, expected.layout)
            update = read_update(content, client, expected)
        except PayloadError as error:
            intake.drop(client, error, expected.server_round)
            continue
        if isinstance(update, Ignored):
            logger.info("round %d: client %s is left out: %s", expected.server_round, client, update.reason)
            if update.lost:
                intake.lost.append(client)
            continue
        yield update, content


def content_of(reply: Message) -> RecordDict:
    """The content of a reply.

    Raises:
        PayloadError: It is an error reply, with the client's own error.
        RunFailedError: The worker that the client ran on is dead; see :func:`check_worker`.
    """
    if not reply.has_error():
        return reply.content
    check_worker(reply.error.reason or "")
    # Ray puts a whole traceback into the reason, whose last line is the error; Flower writes <class 'X'>:<'text'>.
    lines = [line.strip() for line in (reply.error.reason or "").splitlines() if line.strip()]
    reason = lines[-1] if lines else "no reason given"
    wrapped = _FLOWER_REASON.fullmatch(reason)
    reason = f"{wrapped[1]}: {wrapped[2]}" if wrapped else reason
    reason = reason if len(reason) <= _REASON_LENGTH else f"{reason[:_REASON_LENGTH]} …"
    raise PayloadError(f"its app failed (error {reply.error.code}): {reason}")


def check_worker(reason: str) -> None:
    """End the run where the reason of an error reply is that a worker of the simulation engine died.

    Flower puts the dead worker back among the living ones, so from then on every client that is sent to it would
    fail, each time another.

    Raises:
        RunFailedError: Names the worker's process, if Ray tells it, and says what to do.
    """
    found = _DEAD_WORKER.match(reason)
    if found is None:
        return
    pid = re.search(r"\bpid: (\d+)", reason)
    cause = "out of memory" if found[1] == "OutOfMemoryError" or "memory" in reason else "killed, or crashed"
    raise RunFailedError(
        f"a Ray worker of the simulation died ({found[1]}{f', process {pid[1]}' if pid else ''}; {cause}), and Flower"
        ' would go on sending clients to it; resume the run (resume="<its results folder>") after freeing memory or'
        " with fewer clients at once"
    )


def check_trainable(client: str, content: RecordDict, layout: Layout) -> None:
    """Compare the names that a client trains (told with its first reply) with the strategy's.

    Raises:
        RunFailedError: They differ; going on would train something else than was asked for.
    """
    theirs = about_client(content).get("trainable")
    if isinstance(theirs, list) and set(theirs) != set(layout.trainable):
        ours = set(layout.trainable)
        raise RunFailedError(
            f"client {client} trains other parameters than the strategy expects: only the client trains"
            f" {sorted(set(map(str, theirs)) - ours)}, only the strategy {sorted(ours - set(map(str, theirs)))};"
            f" pass trainable={theirs!r} to the strategy, or freeze the same layers on both sides"
        )


def read_update(content: RecordDict, client: str, expected: Expected) -> Update[Payload] | Ignored:
    """Decode one training reply and check it against the global model.

    Args:
        content: What came.
        client: The sender's client id.
        expected: What it must be.

    Raises:
        PayloadError: Something is missing or wrong; the message names record and entry.
    """
    layout, keys, payload = expected.layout, expected.keys, expected.payload
    about = about_client(content)
    trained_round = about.get("trained-round", expected.server_round)
    if trained_round != expected.server_round:
        raise PayloadError(f"it answers round {trained_round!r}, expected round {expected.server_round}")
    if about.get("state", "ok") == "lost":
        return Ignored("its saved state is lost; it starts afresh in its next round", lost=True)

    metrics = _metrics(content)
    num_examples = count_of(metrics, keys.weight)
    if num_examples == 0:
        return Ignored("it has no training examples")
    for name in expected.needs:
        if name not in metrics:
            raise PayloadError(
                f"metrics/{name} is missing; this algorithm needs its client half: train with fedstrat.train(…), or"
                " inside `with LocalSession(msg, context, model) as session:` and reply with session.reply(…)"
            )
        number(metrics, name)
    num_steps = number(metrics, "num-steps") if "num-steps" in metrics else 1
    lr_sum = number(metrics, "lr-sum") if "lr-sum" in metrics else math.nan
    if num_steps < 0 or lr_sum < 0:
        raise PayloadError(f"metrics: expected num-steps and lr-sum >= 0, but got {num_steps:g} and {lr_sum:g}")

    params, buffers = (
        _read_model(content, expected) if expected.buffers is None else ({}, _read_buffers(content, expected.buffers))
    )
    extra = payload.decode(content, layout.params_like(), "the client half of this algorithm is needed")
    expected.check(extra)
    return Update(
        client=client,
        num_examples=num_examples,
        num_steps=int(num_steps),
        lr_sum=lr_sum,
        params=params,
        buffers=buffers,
        metrics={k: as_float(v) for k, v in metrics.items() if isinstance(v, int | float)},
        extra=extra,
    )


def _read_model(content: RecordDict, expected: Expected) -> tuple[Params, Params]:
    """The client's whole model, told apart into parameters and buffers."""
    layout, keys = expected.layout, expected.keys
    sent = records(content, ArrayRecord)
    record, delta = sent.get(keys.arrays), sent.get(deltas.RECORD)
    if record is None and delta is not None and (rounded := expected.rounded) is not None:
        return deltas.read(delta, rounded.x, rounded.dtype), _read_buffers(content, rounded.buffers)
    if record is None:
        # Flower's own clients may name their one ArrayRecord as they like.
        extra = {kebab(name) for name in expected.payload.names()}
        others = [name for name in sent if name not in extra]
        if len(others) != 1:
            raise PayloadError(f"expected an ArrayRecord '{keys.arrays}', but got {sorted(content.keys())}")
        record = sent[others[0]]
    model = decode(record, keys.arrays)
    like, unless = layout.arrays, expected.unchecked
    check_like(model, like, keys.arrays, owner="the global model", finite=True, unless=unless)
    return layout.split(model)


def _read_buffers(content: RecordDict, present: Params) -> Params:
    """The buffers as the client has them: those that it sent, and the present ones."""
    sent = decode(records(content, ArrayRecord).get("buffers", ArrayRecord()), "buffers")
    check_like(sent, {n: b for n, b in present.items() if n in sent}, "buffers", owner="the global model", finite=True)
    return {**present, **sent}


def read_evaluations(
    replies: Iterable[tuple[str, Message]], server_round: int, keys: Keys
) -> tuple[list[RecordDict], Counts, Counts, Counts]:
    """Read a round's evaluation replies.

    Returns:
        (the good ones' contents, client id -> counts of those that count, the same of their personal models on their
        own test data, and on the other clients').
    """
    contents: list[RecordDict] = []
    counts: Counts = {}
    personal: Counts = {}
    elsewhere: Counts = {}
    for client, reply in replies:
        try:
            content = content_of(reply)
            read = read_counts(content, keys)
            own = read_counts(content, keys, prefix="personal-")
            others = read_counts(content, Keys(keys.arrays, _ELSEWHERE + "num-examples"), prefix=_ELSEWHERE)
        except PayloadError as error:
            logger.warning("round %d: evaluation of client %s is dropped: %s", server_round, client, error)
            continue
        contents.append(content)
        if read is not None:
            counts[client] = read
        if own is not None:
            personal[client] = own
        if others is not None:
            elsewhere[client] = others
    return contents, counts, personal, elsewhere


def read_received(contents: list[RecordDict], updates: list[Update[Any]], server_round: int, keys: Keys) -> Counts:
    """Read what the clients of good training replies say about the model that they received."""
    counts: Counts = {}
    for content, update in zip(contents, updates, strict=True):
        try:
            read = read_counts(content, Keys(keys.arrays, _RECEIVED + "num-examples"), prefix=_RECEIVED)
        except PayloadError as error:
            logger.warning("round %d: evaluation of client %s is dropped: %s", server_round, update.client, error)
            continue
        if read is not None:
            counts[update.client] = read
    return counts


def read_counts(content: RecordDict, keys: Keys, prefix: str = "") -> tuple[int, float, int] | None:
    """Read ``(num-correct, loss-sum, num-examples)`` of an evaluation reply; None where the client doesn't count.

    Args:
        content: The reply.
        keys: Record names.
        prefix: "personal-" for the client's own model, "personal-elsewhere-" for it on others' data, "received-" for
            the global model in a training reply.

    Raises:
        PayloadError: A count is negative, NaN, or there are more correct than examples.
    """
    metrics = _metrics(content)
    if prefix in (_ELSEWHERE, _RECEIVED) and f"{prefix}num-correct" not in metrics:
        return None
    num_examples = count_of(metrics, keys.weight)
    if f"{prefix}num-correct" not in metrics:
        return None
    correct = number(metrics, f"{prefix}num-correct")
    if not 0 <= correct <= num_examples:
        raise PayloadError(f"metrics/{prefix}num-correct: expected 0 to {num_examples:g}, but got {correct:g}")
    # A diverged model's loss may be infinite: that is a result, not a broken reply.
    loss_sum = metrics.get(f"{prefix}loss-sum", math.nan)
    return int(correct), as_float(loss_sum), int(num_examples)


def number(metrics: MetricRecord, name: str) -> float:
    """Read one finite number.

    Raises:
        PayloadError: It is missing, a list, NaN or infinite.
    """
    value = metrics.get(name)
    read = as_float(value)
    if not math.isfinite(read):
        raise PayloadError(f"metrics/{name}: expected one finite number, but got {str(value)[:100]}")
    return read


def count_of(metrics: MetricRecord, name: str) -> float:
    """Read a number of examples.

    Raises:
        PayloadError: As :func:`number`; or it is negative, or above 2^53.
    """
    count = number(metrics, name)
    if not 0 <= count <= MOST_EXAMPLES:
        raise PayloadError(f"metrics/{name}: expected a number of 0 to 2^53, but got {count:g}")
    return count


def as_float(value: object) -> float:
    """A metric as a float: NaN for what is no number, infinity for an integer beyond the floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def clip_update(update: Update[Any], params: Params, max_norm: float, server_round: int) -> Update[Any]:
    """Scale ``y - x`` down to at most ``max_norm`` over all trainable parameters."""
    squares = [(update.params[n].double() - x.double()).square().sum().item() for n, x in params.items()]
    norm = math.sqrt(math.fsum(squares))
    if norm <= max_norm:
        return update
    logger.info("round %d: client %s: |y - x| = %.3g clipped to %g", server_round, update.client, norm, max_norm)
    scale = max_norm / norm
    clipped = {
        n: (x.double() + (update.params[n].double() - x.double()) * scale).to(x.dtype) for n, x in params.items()
    }
    return replace(update, params=clipped)


def mean_metrics(records: list[RecordDict], weight_key: str) -> dict[str, int | float | list[int] | list[float]]:
    """Example-weighted mean of every metric, over the clients that report it; the weight itself left out.

    As Flower's default does, but a metric that one client lacks doesn't end the run.
    """
    sums: dict[str, tuple[list[float], float, bool]] = {}
    for record in records:
        metrics = _metrics(record)
        weight = as_float(metrics.get(weight_key, 0.0))
        for name, value in metrics.items():
            if name == weight_key:
                continue
            values = [as_float(v) for v in value] if isinstance(value, list) else [as_float(value)]
            total, weights, scalar = sums.get(name, ([0.0] * len(values), 0.0, not isinstance(value, list)))
            if len(total) == len(values):
                sums[name] = (
                    [t + weight * v for t, v in zip(total, values, strict=True)],
                    weights + weight,
                    scalar,
                )
    return {
        name: total[0] / weights if scalar else [t / weights for t in total]
        for name, (total, weights, scalar) in sums.items()
        if weights > 0
    }


def _metrics(content: RecordDict) -> MetricRecord:
    found = records(content, MetricRecord)
    if len(found) != 1:
        raise PayloadError(f"expected one MetricRecord, but got {len(found)} ({', '.join(found) or 'none'})")
    return next(iter(found.values()))


def about_client(content: RecordDict) -> ConfigRecord:
    """What a reply says about its client; empty where it says nothing."""
    record = content.get("client")
    return record if isinstance(record, ConfigRecord) else ConfigRecord()
