"""A ClientApp's handlers in one line each: ``train``, ``evaluate``, ``query``.

torch is imported inside the handlers that need it, so a query is answered without it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedstrat.errors import ConfigError
from fedstrat.flower import client_id, records

if TYPE_CHECKING:
    import torch

    from fedstrat.local.rule import LossFunction

logger = logging.getLogger("flwr")


def train(
    msg: Message,
    context: Context,
    model: "torch.nn.Module",
    loader: Iterable[Any],
    *,
    loss_fn: "LossFunction | None" = None,
    lr: float | None = None,
    epochs: int | None = None,
    batch_hook: Callable[[Any], Any] | None = None,
    names: Iterable[str] | Callable[[str], bool] | None = None,
    test_data: "Iterable[Any] | Callable[[], Iterable[Any]] | None" = None,
) -> Message:
    """Answer a training message: load, train under the message's algorithm, reply.

    Args:
        msg: The training message of a fedstrat Strategy.
        context: The ClientApp's context; its run config may hold ``train.momentum``, ``train.weight-decay``,
            ``train.clip-norm``, ``train.lr-schedule``, ``train.lr-decay``, ``train.device``, ``train.threads``,
            ``train.amp``, ``train.channels-last`` and ``train.compile``.
        model: The model.
        loader: Yields batches (x, y); re-iterable. ``loader.num_examples`` or ``len(loader.dataset)`` is n_i.
        loss_fn: Mean loss of a batch; cross-entropy by default.
        lr: Learning rate; None reads ``lr`` of the message's config, then ``train.lr`` of the run config (on its
            schedule).
        epochs: Local epochs; None reads ``local-epochs`` or ``epochs``, then ``train.local-epochs``. A node of
            smaller means sets its own by ``local-epochs`` in its node config, which stands above all of these.
        batch_hook: Sees every batch before it is used; what it returns (if not None) takes its place.
        names: Entries of the ``state_dict`` that are exchanged, where it isn't the whole; see ``LocalSession``.
        test_data: Batches (x, y) of this client's test data, or a function that gives them; used only where the server
            asks for them (``evaluate_in_train``).

    Raises:
        ConfigError: No learning rate or number of epochs anywhere.
        PayloadError: The message doesn't fit the model.
    """
    from fedstrat.local import loop  # noqa: PLC0415
    from fedstrat.local.device import place, threads  # noqa: PLC0415
    from fedstrat.local.kept import is_kept  # noqa: PLC0415
    from fedstrat.local.session import LocalSession  # noqa: PLC0415

    run = context.run_config
    loss_fn = loss_fn or _cross_entropy()
    if not is_kept(model):
        place(model, run)
    with threads(_threads(run)), LocalSession(msg, context, model, names) as session:
        num_examples = examples_of(loader)
        if session.lost or num_examples == 0:
            return session.reply(num_examples)
        if session.evaluates_received and test_data is not None:
            with loop.same_randomness(loader):  # whoever makes the data may draw, too
                session.evaluate_received(test_data() if callable(test_data) else test_data, loss_fn)
        rate = _lr(lr, session.config, run, session.server_round)
        steps: dict[str, Any] = {
            "momentum": float(run.get("train.momentum", 0.0)),
            "weight_decay": float(run.get("train.weight-decay", 0.0)),
            "clip_norm": float(run.get("train.clip-norm", 0.0)),
        }
        optimizer = session.optimizer(lr=rate, **steps)
        own_epochs = context.node_config.get("local-epochs")  # a node of smaller means
        passes = session.epochs(
            int(
                own_epochs
                or _first(epochs, session.config, run, "epochs", ("local-epochs", "epochs"), "train.local-epochs")
            )
        )
        if "train_personal" in session.rule.needs_calls:
            session.train_personal(loader, loss_fn, lr=rate, epochs=passes, **steps)
        for call in ("full_gradient", "loss_before"):
            if call in session.rule.needs_calls:
                getattr(session, call)(loader, loss_fn)
        loss = loop.train_epochs(
            model,
            loader,
            optimizer,
            session.rule,
            loss_fn=loss_fn,
            epochs=0 if session.rule.done else passes,
            stop=lambda: session.should_stop(loader, loss_fn),
            batch_hook=batch_hook,
            amp=run.get("train.amp", "off") == "bf16",
        )
        return session.reply(num_examples, {} if loss is None else {"train-loss": loss})


def evaluate(
    msg: Message,
    context: Context,
    model: "torch.nn.Module",
    loader: Iterable[Any],
    *,
    loss_fn: "LossFunction | None" = None,
    elsewhere: "Callable[[], Iterable[Any] | None] | None" = None,
    names: Iterable[str] | Callable[[str], bool] | None = None,
) -> Message:
    """Answer an evaluation message with counts: ``num-examples``, ``num-correct``, ``loss-sum``.

    Args:
        msg: The evaluation message.
        context: The ClientApp's context.
        model: The model.
        loader: Yields batches (x, y) of this client's test data; may be empty.
        loss_fn: Mean loss of a batch; cross-entropy by default.
        elsewhere: Gives batches of other clients' test data, where this process has them (in a simulation), or None;
            called only when the server asks how the personal model does on them.
        names: Entries of the ``state_dict`` that are exchanged, where it isn't the whole.
    """
    from fedstrat.local import kept, loop  # noqa: PLC0415
    from fedstrat.local.device import place, threads  # noqa: PLC0415
    from fedstrat.local.session import asked_for, load_own, model_record  # noqa: PLC0415

    run = context.run_config
    asked = asked_for(msg)
    loss_fn = loss_fn or _cross_entropy()
    if not kept.is_kept(model):
        place(model, run)
    with threads(_threads(run)):
        kept.load(model, model_record(msg), names, stays=not asked)
        correct, loss_sum, seen = loop.evaluate(model, loader, loss_fn=loss_fn)
        metrics = MetricRecord({"num-examples": seen, "num-correct": correct, "loss-sum": loss_sum})
        if "sharpness" in asked and (risen := _sharpness(model, loader, loss_fn)) is not None:
            metrics["sharpness"] = risen
        if "evaluate-personal" in asked:
            # A client that never trained has no model of its own yet: its personal model is the global one.
            if load_own(msg, context, model):
                correct, loss_sum, _ = loop.evaluate(model, loader, loss_fn=loss_fn)
            metrics["personal-num-correct"], metrics["personal-loss-sum"] = correct, loss_sum
            others = elsewhere() if elsewhere is not None and "generalisation" in asked else None
            if others is not None:
                correct, _, seen = loop.evaluate(model, others, loss_fn=loss_fn)
                metrics["personal-elsewhere-num-correct"] = correct
                metrics["personal-elsewhere-num-examples"] = seen
    return Message(RecordDict({"metrics": metrics, "client": _about(context)}), reply_to=msg)


def query(msg: Message, context: Context, *, num_examples: Callable[[], int] | int | None = None) -> Message:
    """Answer a query with this client's id, without importing torch.

    Args:
        msg: The query.
        context: The ClientApp's context.
        num_examples: Training examples of this client, or a function that counts them; called only when asked.
    """
    about = _about(context)
    asked = any(bool(c.get("fedstrat.need-num-examples")) for c in records(msg.content, ConfigRecord).values())
    if asked and num_examples is not None:
        about["num-examples"] = num_examples() if callable(num_examples) else num_examples
    return Message(RecordDict({"client": about}), reply_to=msg)


def examples_of(loader: Iterable[Any]) -> int:
    """Count a loader's examples: its ``num_examples``, its sampler's or dataset's length, or by going through it."""
    counted = getattr(loader, "num_examples", None)
    if isinstance(counted, int):
        return counted
    for part in ("sampler", "dataset"):  # a sampler may draw a part of the data set
        owner = getattr(loader, part, None)
        if isinstance(owner, Sized):
            return len(owner)
    return sum(len(y) for _, y in loader)


def _sharpness(model: "torch.nn.Module", loader: Iterable[Any], loss_fn: "LossFunction") -> float | None:
    """Explains a result, so it may never cost one: None where this loss has no gradient or memory is short."""
    from fedstrat.local.sharpness import sharpness  # noqa: PLC0415

    try:
        return sharpness(model, loader, loss_fn)
    except RuntimeError as error:
        logger.warning("the sharpness of the model isn't measured here: %s", error)
        return None


def _about(context: Context) -> ConfigRecord:
    return ConfigRecord({"client-id": client_id(context)})


def _cross_entropy() -> "LossFunction":
    import torch  # noqa: PLC0415

    return torch.nn.functional.cross_entropy


def _threads(run: Mapping[str, Any]) -> int | None:
    count = run.get("train.threads")
    return int(count) if count else None


def _lr(given: float | None, config: Mapping[str, Any], run: Mapping[str, Any], server_round: int) -> float:
    from fedstrat.local.schedule import scheduled_lr  # noqa: PLC0415

    lr = float(_first(given, config, run, "lr", ("lr",), "train.lr"))
    if given is not None or "lr" in config:
        return lr
    return scheduled_lr(
        lr,
        str(run.get("train.lr-schedule", "constant")),
        server_round,
        decay=float(run.get("train.lr-decay", 1.0)),
        num_rounds=int(run.get("num-server-rounds", 0)),
    )


def _first(
    given: Any,
    config: Mapping[str, Any],
    run: Mapping[str, Any],
    name: str,
    keys: tuple[str, ...],
    run_key: str,
) -> Any:
    if given is not None:
        return given
    for key in keys:
        if key in config:
            return config[key]
    if run_key in run:
        return run[run_key]
    raise ConfigError(
        f"fedstrat.train: no {name}; pass {name}=…, or put '{keys[0]}' into train_config, or '{run_key}' into the"
        " run config"
    )
