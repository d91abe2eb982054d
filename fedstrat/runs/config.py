"""The run config: every key checked, then turned into objects.

Flower hands a run config over as a flat mapping such as ``{"craft.server-lr": 0.1}``. ``parse`` checks all of
it, the tables of unselected algorithms too, and returns a frozen ``RunConfig``.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from fedstrat.errors import ConfigError, UnknownSettingError, nearest
from fedstrat.naming import kebab, snake
from fedstrat.runs.keys import OneOf, RunKeys, Table, algorithms
from fedstrat.runs.overrides import unknown_key

if TYPE_CHECKING:
    from fedstrat.strategies.base import FedStrategy

Scalar = bool | int | float | str

_BOUND_WORDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """One key of the run config, as people should be told about it.

    Attributes:
        name: The flat name, for example ``train.batch-size``.
        type: Its type in words, for example ``float`` or ``'layer' | 'tensor'``.
        default: Its default as the run config spells it: 0 or "" for None.
        range: Its bounds in words, for example ``>= 0 and < 1``; empty without bounds.
        doc: What it means, with its unit.
        off: The value that means None, 0 or ""; None where the key can't be off.
        choices: The values that it takes, where these are listed.
        names: Where the choices come from, if from a table of names.
    """

    name: str
    type: str
    default: Scalar
    range: str
    doc: str
    off: Scalar | None = None
    choices: tuple[Scalar, ...] = ()
    names: OneOf | None = None


class RunConfig(RunKeys):
    """A checked run config; keys are attributes in Python's spelling, such as ``config.train.batch_size``.

    Attributes:
        hypers: Algorithm -> its hyper-parameters by Python name, with None where the run config says 0 or "".
        flat: The whole run config as Flower spells it, defaults included.
    """

    hypers: Mapping[str, Mapping[str, Any]]
    flat: Mapping[str, Scalar]

    def strategy(self, **settings: Any) -> "FedStrategy[Any, Any]":
        """Build the Strategy that this run config asks for.

        Args:
            **settings: What a run config can't say, such as ``trainable``.

        Raises:
            ConfigError: Hyper-parameters of the algorithm contradict one another.
        """
        cls = algorithms()[self.algorithm].strategy
        for name in ("evaluate_personal", "evaluate_in_train"):
            if name in cls.hypers:
                settings.setdefault(name, getattr(self, name))
        own = dict(self.hypers[self.algorithm])
        if isinstance(own.get("aggregator"), str):
            own["aggregator"] = algorithms()[own["aggregator"]].strategy(**self.hypers[own["aggregator"]])
        strategy: FedStrategy[Any, Any] = cls(
            **own,
            fraction_train=self.fraction_train,
            fraction_evaluate=self.fraction_evaluate,
            min_train_nodes=1,
            min_evaluate_nodes=1,
            # The ServerApp waits for num-clients once; a node that dies later must not stop the run.
            min_available_nodes=1 if self.num_clients else 2,
            seed=self.seed,
            round_timeout=self.round_timeout or None,
            connect_timeout=self.connect_timeout,
            min_replies=self.min_replies,
            max_failed_rounds=self.max_failed_rounds,
            max_update_norm=self.max_update_norm or None,
            update_dtype=self.update_dtype,
            streaming=self.streaming,
            aggregation_device=self.aggregation_device,
            straggler_share=self.train.straggler_share,
            **settings,
        )
        return strategy


def parse(flat: Mapping[str, Scalar]) -> RunConfig:
    """Check a flat run config; missing keys take their defaults.

    Args:
        flat: Flat key -> value, for example ``{"num-server-rounds": 30, "craft.server-lr": 0.1}``.

    Raises:
        UnknownSettingError: Keys that nobody reads; each with the nearest that exists.
        ConfigError: Values of the wrong type, out of range, or at odds with others; each is named.
    """
    table = keys()
    unknown = [unknown_key(name, table) for name in flat if name not in table]
    if unknown:
        raise UnknownSettingError("\n".join(unknown))
    wrong = {name for name, value in flat.items() if not _is_choice(table[name], value)}
    try:
        checked = _schema()(**_nest(flat, table))
    except ValidationError as error:
        wrong |= {_key_name(e["loc"]) for e in error.errors()}
    if wrong:
        raise ConfigError("\n".join(_expected(table[name], flat[name]) for name in flat if name in wrong))
    contradictions = _contradictions(checked)
    if contradictions:
        raise ConfigError("\n".join(contradictions))
    config = RunConfig(
        **{name: getattr(checked, name) for name in RunKeys.model_fields},
        hypers={name: dict(getattr(checked, snake(name))) for name in algorithms()},
        flat={name: _spell(_look_up(checked, name), key) for name, key in table.items()},
    )
    # What an algorithm checks across its own hyper-parameters, it checks when it is made.
    algorithms()[config.algorithm].strategy(**config.hypers[config.algorithm])
    return config


def keys() -> Mapping[str, Key]:
    """Every key of the run config by its flat name, table after table."""
    return _keys(_schema())


@cache
def _keys(schema: type[RunKeys]) -> Mapping[str, Key]:
    found: dict[str, Key] = {}
    tables: list[tuple[str, type[BaseModel]]] = [("", schema)]
    for prefix, model in tables:
        for name, info in model.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                tables.append((f"{kebab(name)}.", info.annotation))
            else:
                found[prefix + kebab(name)] = _describe(prefix + kebab(name), info)
    return types.MappingProxyType(found)


def defaults() -> dict[str, Scalar]:
    """The run config that an empty mapping stands for."""
    return {name: key.default for name, key in keys().items()}


def _schema() -> type[RunKeys]:
    """``RunKeys`` with one table per algorithm: what its Strategy declares beyond the shared settings."""
    # Users add algorithms to the table, so the algorithms are part of what is remembered.
    return _schema_for(tuple((name, algorithm.strategy) for name, algorithm in algorithms().items()))


@cache
def _schema_for(strategies: tuple[tuple[str, "type[FedStrategy[Any, Any]]"], ...]) -> type[RunKeys]:
    from fedstrat.strategies.base import FedStrategy  # noqa: PLC0415  (imports torch)

    tables: dict[str, Any] = {}
    for name, strategy in strategies:
        fields: dict[str, Any] = {}
        for hyper_name, h in strategy.hypers.items():
            if h.run_config and hyper_name not in FedStrategy.hypers:
                bounds: dict[str, Any] = dict(h.bounds)
                fields[hyper_name] = (h.type, Field(default=h.default, description=h.doc, **bounds))
        model = create_model(f"{strategy.__name__}Keys", __base__=Table, **fields)
        tables[snake(name)] = (model, model())
    return create_model("AllKeys", __base__=RunKeys, **tables)


def _describe(name: str, info: FieldInfo) -> Key:
    from fedstrat.strategies.settings import type_name  # noqa: PLC0415  (its package imports torch)

    is_union = typing.get_origin(info.annotation) in (typing.Union, types.UnionType)
    arms = typing.get_args(info.annotation) if is_union else (info.annotation,)
    scalars = [arm for arm in arms if arm in (bool, int, float, str) or typing.get_origin(arm) is Literal]
    choices = [value for arm in scalars for value in typing.get_args(arm)]
    named = [mark for mark in info.metadata if isinstance(mark, OneOf)]
    type_words = " | ".join(type_name(arm) for arm in scalars)
    if named:
        choices = list(named[0].names())
        type_words = " | ".join(repr(choice) for choice in choices)
    optional = types.NoneType in arms
    off: Scalar = "" if str in scalars or choices else 0.0 if float in scalars else 0
    bounds = [
        f"{word} {getattr(mark, bound):g}"
        for mark in info.metadata
        for bound, word in _BOUND_WORDS.items()
        if hasattr(mark, bound)
    ]
    return Key(
        name=name,
        type=type_words + (" | 'package.module:Factory'" if named and named[0].or_import_path else ""),
        default=off if info.default is None else info.default,
        range=" and ".join(bounds),
        doc=info.description or "",
        off=off if optional else None,
        choices=tuple(choices),
        names=named[0] if named else None,
    )


def _nest(flat: Mapping[str, Scalar], table: Mapping[str, Key]) -> dict[str, Any]:
    """Flat run-config keys as nested Python names, with None where 0 or "" means off."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        inner, _, leaf = name.rpartition(".")
        is_off = table[name].off is not None and not isinstance(value, bool) and value in (0, "")
        place = nested.setdefault(snake(inner), {}) if inner else nested
        place[snake(leaf)] = None if is_off else value
    return nested


def _key_name(location: tuple[int | str, ...]) -> str:
    """The flat key that pydantic means by ``location``, which names the member of a union too."""
    first = kebab(str(location[0]))
    return first if first in keys() else f"{first}.{kebab(str(location[1]))}"


def _look_up(config: BaseModel, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, snake(part))
    return config


def _spell(value: Any, key: Key) -> Scalar:
    spelled: Scalar = key.off if value is None and key.off is not None else value
    return spelled


def _is_choice(key: Key, value: Scalar) -> bool:
    """Whether ``value`` is among the names of ``key``, where they come from a table."""
    # pydantic would take True and 1.0 for the choice 1.
    if any(choice == value and type(choice) is not type(value) for choice in key.choices):
        return False
    if key.names is None or value in key.choices:
        return True
    return key.names.or_import_path and isinstance(value, str) and _is_import_path(value)


def _is_import_path(text: str) -> bool:
    module, _, attribute = text.partition(":")
    return all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])


def _expected(key: Key, value: object) -> str:
    """One sentence about a value that ``key`` doesn't take."""
    what = f"{key.type}{f' {key.range}' if key.range else ''}"
    off = f", or {key.off!r} for off" if key.off is not None else ""
    choices = [choice for choice in key.choices if isinstance(choice, str)]
    if choices and isinstance(value, str):  # there may be many
        hint = nearest(value, choices)
        return f"run config: '{key.name}' can't be {value!r}{hint} Expected '{key.name}' to be {what}{off} ({key.doc})."
    return f"run config: expected '{key.name}' to be {what}{off} ({key.doc}), but got {value!r}."


def _contradictions(config: RunKeys) -> list[str]:
    """What is wrong between keys that are each right, a sentence per contradiction."""
    problems = []
    train = config.train
    if train.lr_schedule != "exponential" and train.lr_decay != 1.0:
        problems.append(
            f"run config: 'train.lr-decay' = {train.lr_decay:g} would be ignored, as 'train.lr-schedule' is"
            f" '{train.lr_schedule}'; set 'train.lr-schedule' to 'exponential', or 'train.lr-decay' to 1.0"
        )
    cohort = max(int(config.fraction_train * config.num_clients), 1)
    if config.num_clients and config.min_replies > cohort:
        problems.append(
            f"run config: 'min-replies' = {config.min_replies} can never be reached: of 'num-clients' ="
            f" {config.num_clients} clients 'fraction-train' = {config.fraction_train:g} lets {cohort} train"
            f" in a round; lower 'min-replies' or raise 'fraction-train'"
        )
    problems += _data_contradictions(config)
    goals = {"target-accuracy": config.target_accuracy, "patience": config.patience}
    for name, goal in goals.items():
        if goal and config.fraction_evaluate == 0.0 and not config.evaluate_in_train:
            problems.append(
                f"run config: '{name}' = {goal:g} needs evaluations, but 'fraction-evaluate' is 0; raise it,"
                f" set 'evaluate-in-train' to true, or set '{name}' to 0"
            )
    if config.evaluate_in_train and "evaluate_in_train" not in algorithms()[config.algorithm].strategy.hypers:
        problems.append(
            f"run config: 'evaluate-in-train' needs the model in the training messages, but '{config.algorithm}'"
            " sends parts of it; set it to false"
        )
    if config.update_dtype != "model" and not algorithms()[config.algorithm].strategy.sends_model:
        problems.append(
            f"run config: 'update-dtype' = '{config.update_dtype}' rounds the models that clients send, but with"
            f" '{config.algorithm}' they send parts of them; set it to 'model'"
        )
    if config.streaming and not algorithms()[config.algorithm].strategy.steps_by_mean:
        problems.append(
            f"run config: 'streaming' lets go of each update, but '{config.algorithm}' needs all of a round at once;"
            " set it to false"
        )
    return problems


def _data_contradictions(config: RunKeys) -> list[str]:
    from fedstrat.data.protocols import FIXED  # noqa: PLC0415  (so that a wrong key is told before data are)
    from fedstrat.data.sources import TEXTS  # noqa: PLC0415
    from fedstrat.models.catalogue import FOR_TEXT  # noqa: PLC0415  (imports torch)

    dataset, model = config.dataset, config.model.name
    problems = [
        f"run config: 'dataset.{kebab(name)}' = {getattr(dataset, name):g} would be ignored, as the partition"
        f" '{dataset.partition}' fixes it at {fixed:g}; set it to that, or choose another 'dataset.partition'"
        for name, fixed in FIXED.get(dataset.partition, {}).items()
        if getattr(dataset, name) not in (fixed, getattr(type(dataset)(), name))
    ]
    if ":" not in model and (dataset.name in TEXTS) != (model in FOR_TEXT):
        texts = f"{', '.join(FOR_TEXT)} or one of your own"
        problems.append(
            f"run config: 'dataset.name' = '{dataset.name}' holds texts, which 'model.name' = '{model}' can't read; set"
            f" 'model.name' to {texts}"
            if dataset.name in TEXTS
            else f"run config: 'model.name' = '{model}' reads texts, but 'dataset.name' = '{dataset.name}' holds none;"
            f" set 'dataset.name' to {' or '.join(TEXTS)}, or choose another 'model.name'"
        )
    return problems
