"""Hyper-parameters: declared once, in the class body of a Strategy.

``mu: float = hyper(default=0.1, ge=0.0, symbol="mu", doc="…")`` gives the constructor's keyword, its check
(pydantic: strict types, unknown names forbidden, infinities and NaN refused), the key ``fedprox.mu`` of the
run config, the row in the documentation and the text of the errors.
"""

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

import pydantic

from fedstrat.errors import ConfigError, UnknownSettingError, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Hyper:
    """One declared hyper-parameter."""

    default: Any
    doc: str
    symbol: str
    bounds: Mapping[str, float]
    flower_name: str | None
    run_config: bool
    type: Any = None

    @property
    def range(self) -> str:
        """The bounds in words, for example ``>= 0.0 and <= 1.0``; empty when there are none."""
        words = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        return " and ".join(f"{words[key]} {value:g}" for key, value in self.bounds.items())


def hyper(
    *,
    default: T,
    doc: str,
    symbol: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    flower_name: str | None = None,
    run_config: bool = True,
) -> T:
    """Declare a hyper-parameter in the class body of a Strategy.

    Args:
        default: The default value; its declared type is the annotation.
        doc: What it does, in one sentence, with its unit.
        symbol: The paper's symbol.
        ge: Smallest allowed value.
        gt: Exclusive lower bound.
        le: Largest allowed value.
        lt: Exclusive upper bound.
        flower_name: Flower's own spelling of the same thing, accepted as an alias.
        run_config: Whether the run config has a key for it (functions and record keys have none).
    """
    bounds = {k: v for k, v in {"ge": ge, "gt": gt, "le": le, "lt": lt}.items() if v is not None}
    return typing.cast("T", Hyper(default, doc, symbol, bounds, flower_name, run_config))


@dataclass_transform(kw_only_default=True, field_specifiers=(hyper,))
class Configured:
    """Base that turns the ``hyper(…)`` declarations of a class into a checked keyword-only constructor."""

    hypers: ClassVar[dict[str, Hyper]] = {}
    _checked: ClassVar[type[pydantic.BaseModel]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, Hyper)}
        types = typing.get_type_hints(cls, include_extras=True) if declared else {}
        own = {name: Hyper(**{**vars(h), "type": types[name]}) for name, h in declared.items()}
        inherited = {name: h for name, h in cls.hypers.items() if name not in own}
        # A class attribute that is a plain value switches an inherited hyper-parameter off.
        cls.hypers = {**own, **{n: h for n, h in inherited.items() if n not in vars(cls)}}
        for name, h in own.items():
            setattr(cls, name, h.default)
        fields: dict[str, Any] = {
            name: (h.type, pydantic.Field(default=h.default, **typing.cast("dict[str, Any]", h.bounds)))
            for name, h in cls.hypers.items()
        }
        config = pydantic.ConfigDict(
            strict=True,
            extra="forbid",
            arbitrary_types_allowed=True,
            allow_inf_nan=False,
            protected_namespaces=(),
        )
        cls._checked = pydantic.create_model(f"{cls.__name__}Settings", __config__=config, **fields)
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=h.default, annotation=h.type)
                for name, h in cls.hypers.items()
            ]
        )

    def __init__(self, **settings: Any) -> None:
        for name, value in check(type(self), settings).items():
            setattr(self, name, value)

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters of this object by name."""
        return {name: getattr(self, name) for name in self.hypers}


def check(cls: type[Configured], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check ``settings`` against the declarations of ``cls`` and fill in the defaults.

    Raises:
        UnknownSettingError: A name that ``cls`` doesn't declare.
        ConfigError: A value of the wrong type or out of range, or a name given twice under both spellings.
    """
    aliases = {h.flower_name: name for name, h in cls.hypers.items() if h.flower_name}
    given: dict[str, Any] = {}
    for name, value in settings.items():
        key = aliases.get(name, name)
        if key in given:
            raise ConfigError(f"{cls.__name__}: '{key}' was given twice, also as '{name}'; give it once")
        if key not in cls.hypers:
            known = [*cls.hypers, *aliases]
            raise UnknownSettingError(
                f"{cls.__name__} has no setting '{name}'{nearest(name, known)} It takes: {', '.join(cls.hypers)}"
            )
        given[key] = value
    try:
        checked = cls._checked(**given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        h = cls.hypers[name]
        raise ConfigError(
            f"{cls.__name__}: expected '{name}' to be {type_name(h.type)}{f' {h.range}' if h.range else ''}"
            f" ({h.doc}), but got {first['input']!r}: {first['msg']}"
        ) from None
    return {name: getattr(checked, name) for name in cls.hypers}


def type_name(annotation: Any) -> str:
    """Name a type as a user would write it, for example ``float`` or ``'layer' | 'tensor'``."""
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(repr(value) for value in typing.get_args(annotation))
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")
