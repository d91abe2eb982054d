"""LocalSession: message in, reply out, around any training loop, ours or the user's."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedstrat import deltas
from fedstrat.errors import PayloadError, RuleError, nearest
from fedstrat.flower import client_id, records
from fedstrat.local import kept, loop
from fedstrat.local.optimizer import RuleOptimizer
from fedstrat.local.rule import PERSONAL, LocalRule, LossFunction
from fedstrat.local.state import StateLostError, open_store, peek, settle
from fedstrat.naming import kebab, snake
from fedstrat.payloads import check_like, chosen, decode, raw_record, to_arrays
from fedstrat.privacy import NO_DELTAS, check_private, mod_around
from fedstrat.seeding import derive

_PREFIX = "fedstrat."
_PLUMBING = {
    "algorithm", "experiment-id", "accepted-round", "pack-content", "seed", "epochs-share", "evaluate-personal",
    "evaluate-in-train", "update-dtype",
}  # fmt: skip
_EXTRAS = ("evaluate-personal", "generalisation", "sharpness")
logger = logging.getLogger("flwr")


class LocalSession:
    """One client's part of one training round.

    ``with LocalSession(msg, context, model) as session:`` loads the received weights into the model, finds the
    algorithm's local rule in the message and this client's state in its store. Leaving the block by an exception
    changes nothing that is remembered.

    Args:
        msg: The training message of a fedstrat Strategy.
        context: The ClientApp's context.
        model: The model; its ``state_dict`` must have the received names, shapes and dtypes.
        names: Entries of the ``state_dict`` that are exchanged, as names or a predicate, where it isn't the whole
            (adapters, a shared body). What isn't exchanged is neither loaded nor sent, and doesn't train.

    Attributes:
        config: The user's part of the message's config.
        client: This client's id.
        server_round: The round.
        lost: Whether state that the server counts on is gone; the reply then says so and carries no update.
    """

    def __init__(
        self,
        msg: Message,
        context: Context,
        model: torch.nn.Module,
        names: Iterable[str] | Callable[[str], bool] | None = None,
    ) -> None:
        self._message, self._context, self._model = msg, context, model
        self._names = None if names is None else chosen(model, names)
        whole = _config(msg)
        self._own = {k.removeprefix(_PREFIX): v for k, v in whole.items() if k.startswith(_PREFIX)}
        self.config: dict[str, Any] = {k: v for k, v in whole.items() if not k.startswith(_PREFIX)}
        self.client = client_id(context)
        self.server_round = int(whole["server-round"])  # type: ignore[arg-type]
        algorithm = str(self._own["algorithm"])
        _check_mods(algorithm, self._exchanged, rounds="update-dtype" in self._own)
        self.rule = _rule(algorithm, self._own, context.node_config)
        self._sends_model = self.rule.sends_model and "update-dtype" not in self._own
        self.lost = False
        self._called: set[str] = set()
        self._loss_before = math.nan
        self._received: dict[str, float] = {}

    @property
    def seed(self) -> int | None:
        """This client's seed of this round, from (run seed, client, round); None where the strategy has no seed."""
        seed = self._own.get("seed")
        return None if seed is None else derive(int(seed), "client", self.client, self.server_round)  # type: ignore[arg-type]

    def epochs(self, most: int) -> int:
        """How many of at most ``most`` epochs to run: fewer where the server made this client a straggler."""
        share = self._own.get("epochs-share")
        return most if share is None or most < 2 else 1 + int(float(share) * (most - 1))  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        self._randomness = torch.get_rng_state()
        if self.seed is not None:
            _seed(self.seed)
        exchanged = self._exchanged()
        params = {n: p for n, p in self._model.named_parameters() if p.requires_grad and n in exchanged}
        # A tied weight has several names and is trained under its first.
        trained = {n for n, p in self._model.named_parameters(remove_duplicate=False) if p.requires_grad}
        buffers = {n: t for n, t in exchanged.items() if n not in trained}
        received = self._receive_extra(self.rule.receives, params)
        state = self._settle()
        on_initial = received is not None and received.on_initial and not self.lost
        if on_initial:
            try:
                received.check_initial({**params, **buffers})
            except StateLostError as error:
                self._lose(error)
        self._load(state, on_initial=on_initial)
        self._buffers_before = {n: t.clone() for n, t in buffers.items()} if not self._sends_model else {}
        self.rule.begin(params, buffers, received, state if self.rule.keeps_state else None)
        return self

    def _exchanged(self) -> dict[str, torch.Tensor]:
        return {n: t for n, t in kept.entries(self._model).items() if self._names is None or n in self._names}

    def _settle(self) -> dict[str, torch.Tensor] | None:
        """Bring this client's state in line with what the server accepted."""
        if not (self.rule.keeps_state or self._keeps_personal):
            return None
        self._store = open_store(self._context, str(self._own["experiment-id"]), self.client)
        try:
            return settle(self._store, int(self._own["accepted-round"]))  # type: ignore[arg-type]
        except StateLostError as error:
            if self.rule.keeps_state:
                self._lose(error)
            return None

    def _lose(self, error: StateLostError) -> None:
        logger.warning("client %s, round %d: %s", self.client, self.server_round, error)
        self.lost = True

    @property
    def _keeps_personal(self) -> bool:
        return bool(self._own.get("evaluate-personal"))

    def _load(self, state: dict[str, torch.Tensor] | None, *, on_initial: bool) -> None:
        """Load the received model, or this client's own where only packs travel (the one as built: ``on_initial``)."""
        payload = self.rule.receives
        extras = {*(payload.names() if payload else ()), "buffers"}
        arrays = records(self._message.content, ArrayRecord)
        models = {n: r for n, r in arrays.items() if snake(n) not in extras}
        if len(models) == 1:
            (self._received_model,) = models.values()
            kept.load(self._model, self._received_model, self._names)
        elif not models and (state is not None or on_initial):
            load_personal(self._model, state or {})
            moved = arrays.get("buffers", ArrayRecord())
            load_some(self._model, decode(moved, "buffers"), "buffers")
        elif not self.lost:
            raise PayloadError(
                f"round {self.server_round}: expected one ArrayRecord with the model, but got {sorted(models)}"
            )

    def _receive_extra(self, payload: type[Any] | None, params: Mapping[str, torch.nn.Parameter]) -> Any:
        if payload is None:
            return None
        for name, record in records(self._message.content, ArrayRecord).items():
            own = snake(name) in payload.names() and payload.per_parameter
            if own and set(record) != set(params):
                theirs, ours = sorted(set(record) - set(params)), sorted(set(params) - set(record))
                raise RuleError(
                    f"round {self.server_round}, record '{name}': the server trains {theirs}, which this model doesn't,"
                    f" and this model trains {ours}, which the server doesn't; pass trainable=… to the strategy, or"
                    " freeze the same layers on both sides"
                )
        like = {n: p.detach() for n, p in params.items()}
        extra = payload.decode(self._message.content, like, "the server must run the same algorithm's Strategy")
        device = next(iter(params.values())).device if params else torch.device("cpu")
        return payload(**{f: {n: t.to(device) for n, t in getattr(extra, f).items()} for f in payload.names()})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.set_rng_state(self._randomness)

    def optimizer(
        self,
        lr: float | None = None,
        *,
        base: torch.optim.Optimizer | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
    ) -> RuleOptimizer:
        """Return the optimizer that runs the rule: plain SGD, or around your own ``base``.

        Args:
            lr: Learning rate eta_l of plain SGD, >= 0.
            base: Your optimizer, where the rule allows it (errors say why not).
            momentum: Momentum of plain SGD, in [0, 1), where the rule allows it.
            weight_decay: lambda, added to the raw gradient, >= 0.
            clip_norm: Bound of the raw gradient's norm; 0 is off.

        Raises:
            RuleError: Neither or both of ``lr`` and ``base``, or a base that the rule can't honour.
        """
        if (lr is None) == (base is None):
            raise RuleError("session.optimizer: give either lr=… (plain SGD) or base=… (your own optimizer)")
        if base is None:
            # A model without trainable parameters still takes part: it takes no step.
            params = list(self.rule.params.values()) or [torch.nn.Parameter(torch.zeros(1), requires_grad=False)]
            base = torch.optim.SGD(params, lr=float(lr), momentum=momentum)  # type: ignore[arg-type]
        buffers = list(self._model.buffers())
        return RuleOptimizer(base, self.rule, weight_decay=weight_decay, clip_norm=clip_norm, buffers=buffers)

    def full_gradient(self, loader: Iterable[Any], loss_fn: LossFunction) -> None:
        """Evaluate ``grad f_i(x)`` over all local data before the first step, where the rule needs it."""
        if "full_gradient" not in self.rule.needs_calls:
            return  # a loop may always make the call; it costs nothing elsewhere
        self._check_early("full_gradient")
        self.rule.prepare(lambda: loop.full_gradient(self._model, self.rule.params, loader, loss_fn))
        self._called.add("full_gradient")

    def should_stop(self, loader: Iterable[Any], loss_fn: LossFunction) -> bool:
        """Whether the rule stops local training here; ask at the end of every epoch.

        Raises:
            RuleError: The rule compares with the gradient at the received model, and nobody evaluated it.
        """
        if "full_gradient" in self.rule.needs_calls and "full_gradient" not in self._called:
            raise RuleError(
                f"{type(self.rule).__name__} needs session.full_gradient(loader, loss_fn) before the first step: it"
                " compares with the gradient at the received model"
            )
        self._called.add("should_stop")
        return self.rule.should_stop(lambda: loop.full_gradient(self._model, self.rule.params, loader, loss_fn))

    def _check_early(self, call: str) -> None:
        if self.rule.num_steps:
            raise RuleError(
                f"session.{call}(loader, loss_fn) evaluates the received model; call it before the first step of the"
                " loop"
            )

    def train_personal(
        self,
        loader: Iterable[Any],
        loss_fn: LossFunction,
        *,
        lr: float,
        epochs: int,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
    ) -> None:
        """Train this client's personal model before the first step of the loop, where the rule keeps one (Ditto).

        Args:
            loader: This client's batches.
            loss_fn: Mean loss of a batch.
            lr: Learning rate of the personal steps.
            epochs: Passes over the loader.
            momentum: Momentum of the personal steps.
            weight_decay: lambda of the weight decay.
            clip_norm: Bound of the raw gradient's norm; 0 is off.
        """
        self._called.add("train_personal")
        self.rule.train_personal(
            self._model,
            loader,
            loss_fn,
            lr=lr,
            epochs=epochs,
            momentum=momentum,
            weight_decay=weight_decay,
            clip_norm=clip_norm,
        )

    def loss_before(self, loader: Iterable[Any], loss_fn: LossFunction) -> float:
        """Evaluate the mean local loss F_i(x) at the received model; travels as ``loss-before``."""
        self._check_early("loss_before")
        with loop.same_randomness(loader):
            _, loss_sum, seen = loop.evaluate(self._model, loop.plain(loader), loss_fn=loss_fn)
        self._loss_before = loss_sum / max(seen, 1)
        self._called.add("loss_before")
        return self._loss_before

    @property
    def evaluates_received(self) -> bool:
        """Whether the server asks how the received model does on this client's test data (``evaluate_in_train``)."""
        return bool(self._own.get("evaluate-in-train"))

    def evaluate_received(self, test_data: Iterable[Any], loss_fn: LossFunction) -> None:
        """Evaluate the received model on test data before the first step, if the server asks; travels in the reply.

        Args:
            test_data: Yields batches (x, y).
            loss_fn: Mean loss of a batch.
        """
        if not self.evaluates_received:
            return
        self._check_early("evaluate_received")
        with loop.same_randomness(test_data):
            correct, loss_sum, seen = loop.evaluate(self._model, test_data, loss_fn=loss_fn)
        self._received = {
            "received-num-examples": seen, "received-num-correct": correct, "received-loss-sum": loss_sum,
        }  # fmt: skip

    def loss(self, x: Any, y: Any, loss_fn: LossFunction) -> torch.Tensor:
        """Return the algorithm's objective of one batch: ``loss_fn(model(x), y)``, and what MOON and FedNTD add to it.

        For the closure of a loop of your own: ``optimizer.step(lambda: session.loss(x, y, loss_fn))``.
        """
        return self.rule.loss(self._model, x, y, loss_fn)

    def reply(self, num_examples: int, metrics: Mapping[str, Any] | None = None) -> Message:
        """Finish the rule and build the reply; new state stays pending until the server accepts it.

        Args:
            num_examples: Training examples of this client, >= 0.
            metrics: Further numbers (or lists of numbers) for the server's training metrics.

        Raises:
            RuleError: The loop left out a call that the rule needs.
        """
        about: dict[str, Any] = {
            "client-id": self.client,
            "trained-round": self.server_round,
            "state": "lost" if self.lost else "ok",
        }
        numbers: dict[str, Any] = {
            **(metrics or {}),  # first: ours can't be overwritten
            "num-examples": num_examples,
            "num-steps": self.rule.num_steps,
            "lr-sum": self.rule.lr_sum,
            **self._received,
            **self.rule.metrics(),
        }
        if "loss_before" in self._called:
            numbers["loss-before"] = self._loss_before
        if self._own["accepted-round"] == 0:
            about["trainable"] = list(self.rule.params)
        content = RecordDict({"metrics": MetricRecord(numbers), "client": ConfigRecord(about)})
        if self.lost:
            return Message(content, reply_to=self._message)
        for needed in self.rule.needs_calls:
            if needed not in self._called and self.rule.num_steps > 0:
                when = "at the end of every epoch" if needed == "should_stop" else "before the first step"
                raise RuleError(
                    f"{type(self.rule).__name__} with these settings needs session.{needed}(loader, loss_fn) {when} of"
                    " the training loop; add the call, or use fedstrat.train(msg, context, model, loader)"
                )
        if self.rule.sends_model and not self._sends_model:
            content[deltas.RECORD] = self._displacements()
        extra, state = self.rule.finish()
        if self._keeps_personal:
            # A rule's own personal model (Ditto's) stands above the trained one.
            state = {**self.rule.personal_model(), **(state or {})}
        if state is not None:
            self._store.write("pending", state, self.server_round)
        if self._sends_model:
            content["arrays"] = to_arrays(self._exchanged())
        else:
            changed = {n: t for n, t in self.rule.buffers.items() if not torch.equal(t, self._buffers_before[n])}
            content["buffers"] = raw_record(changed)
        for name, record in (extra.encode() if extra is not None else {}).items():
            content[name] = record
        return Message(content, reply_to=self._message)

    def _displacements(self) -> ArrayRecord:
        """Encode the rounded ``y_i - x``, and let the rule know what the server will make of it."""
        received = decode(self._received_model, "arrays")
        x = {n: received[n] for n in self.rule.params}
        y = {n: p.detach().cpu() for n, p in self.rule.params.items()}
        delta = deltas.rounded(y, x, getattr(torch, str(self._own["update-dtype"])))
        self.rule.sent = deltas.restored(x, delta)
        return raw_record(delta)


def _seed(seed: int) -> None:
    """As ``torch.manual_seed``, without its search of all backends, which costs more than a small client's step."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def load_personal(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> bool:
    """Load the entries ``personal/<name>`` of a client's state; returns whether there were any."""
    own = {n.removeprefix(PERSONAL): t for n, t in state.items() if n.startswith(PERSONAL)}
    load_some(model, own, "personal model")
    return bool(own)


def load_some(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Load some entries of a model's state.

    Raises:
        PayloadError: One of them doesn't fit the model.
    """
    kept.forget(model)
    state = kept.entries(model)
    check_like(tensors, {n: state[n] for n in tensors if n in state}, what, owner="this model")
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)


def _config(msg: Message) -> ConfigRecord:
    for record in records(msg.content, ConfigRecord).values():
        if f"{_PREFIX}algorithm" in record:
            return record
    raise PayloadError(
        "the message names no algorithm (no 'fedstrat.algorithm' in a ConfigRecord); LocalSession and fedstrat.train"
        " answer Strategies of fedstrat: use one on the server"
    )


def _check_mods(algorithm: str, model: Callable[[], Mapping[str, torch.Tensor]], *, rounds: bool) -> None:
    from fedstrat.strategies import ALGORITHMS  # noqa: PLC0415

    mod = mod_around()
    if mod is not None and algorithm in ALGORITHMS:
        why_not = ALGORITHMS[algorithm].strategy.refuses_privacy or (NO_DELTAS if rounds else None)
        check_private(mod, algorithm, why_not, model())


def _rule(algorithm: str, own: Mapping[str, Any], node_config: Mapping[str, Any]) -> LocalRule[Any, Any]:
    from fedstrat.strategies import ALGORITHMS  # noqa: PLC0415 - strategies import the rules' base

    if algorithm not in ALGORITHMS:
        raise RuleError(
            f"the server runs '{algorithm}', which this client doesn't know{nearest(algorithm, ALGORITHMS)} Install the"
            " same fedstrat on both sides, or register your own:"
            " fedstrat.strategies.ALGORITHMS[name] = Algorithm(Strategy, Rule)"
        )
    rule = ALGORITHMS[algorithm].rule
    settings = {snake(k): v for k, v in own.items() if k not in _PLUMBING}
    local = {name: node_config[kebab(name)] for name in rule.local_settings if kebab(name) in node_config}
    if local:
        # What a node sets replaces the whole group: its keep-ratio stands against the server's top-k.
        settings = {k: v for k, v in settings.items() if k not in rule.local_settings} | local
    return rule(**settings)


def model_record(msg: Message) -> Any:
    """The one ArrayRecord of an evaluation message."""
    models = records(msg.content, ArrayRecord)
    if len(models) != 1:
        raise PayloadError(f"expected one ArrayRecord with the model, but got {sorted(models)}")
    return next(iter(models.values()))


def asked_for(msg: Message) -> frozenset[str]:
    """What an evaluation message asks for beside the model's counts.

    "evaluate-personal" (the client's own model too), "generalisation" (that model on other clients' data), "sharpness"
    (of the loss around the model).
    """
    configs = records(msg.content, ConfigRecord).values()
    return frozenset(extra for extra in _EXTRAS for c in configs if _PREFIX + extra in c and c[_PREFIX + extra])


def load_own(msg: Message, context: Context, model: torch.nn.Module) -> bool:
    """Load the client's personal model of the last accepted round; returns whether there is one."""
    for record in records(msg.content, ConfigRecord).values():
        if "fedstrat.experiment-id" in record:
            store = open_store(context, str(record["fedstrat.experiment-id"]), client_id(context))
            state = peek(store, int(record.get("fedstrat.accepted-round", 0)))  # type: ignore[arg-type]
            return state is not None and load_personal(model, state)
    return False
