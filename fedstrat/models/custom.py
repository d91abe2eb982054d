"""Models of the user's own, named by import path."""

import importlib
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from torch import nn

from fedstrat.errors import ConfigError, nearest


def build_custom(path: str, **offered: Any) -> nn.Module:
    """Import ``my_pkg.module:Factory`` and call it.

    Args:
        path: Import path of a class or function that returns a fresh ``nn.Module``.
        **offered: Keyword arguments, each passed if the factory's signature accepts it.

    Raises:
        ConfigError: The path has another form, the module or the attribute is missing, importing or calling
            fails, or the result is no ``nn.Module``.
    """
    factory = find_factory(path)
    given = {name: value for name, value in offered.items() if _accepts(factory, name)}
    try:
        model = factory(**given)
    except Exception as error:
        call = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigError(f"model '{path}': calling it as ({call}) raised {_describe(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model '{path}': expected it to return a torch.nn.Module, but got {_kind(model)}")
    return model


def find_factory(path: str) -> Callable[..., Any]:
    """Import what ``my_pkg.module:Factory`` names, without calling it.

    Raises:
        ConfigError: The path has another form, importing fails, or there is nothing there that can be called.
    """
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise ConfigError(f"model '{path}': expected an import path of the form 'my_pkg.module:Factory'")
    found: Any = _import(path, module_name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(
                f"model '{path}': '{module_name}' has no '{attribute}'{nearest(part, _public(found))}"
            ) from None
    if isinstance(found, nn.Module):
        raise ConfigError(
            f"model '{path}': expected a class or function that makes a model, but it is a model; "
            "every client needs its own"
        )
    if not callable(found):
        raise ConfigError(f"model '{path}': expected a class or function, but it is {_kind(found)}")
    factory: Callable[..., Any] = found
    return factory


def _import(path: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"model '{path}': no module '{missing}' can be imported; "
                "install it, or put its folder on PYTHONPATH, for the server and for every client"
            ) from None
        raise ConfigError(f"model '{path}': importing '{module_name}' raised {_describe(error)}") from None
    except Exception as error:
        raise ConfigError(f"model '{path}': importing '{module_name}' raised {_describe(error)}") from None


def _accepts(factory: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        p.kind is inspect.Parameter.VAR_KEYWORD or (p.name == name and p.kind in by_keyword)
        for p in parameters.values()
    )


def _describe(error: Exception) -> str:
    """The error's type, text and place in the user's code, since the traceback is cut."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    place = f" ({inside[-1].filename}, line {inside[-1].lineno})" if inside else ""
    return f"{type(error).__name__}: {error}{place}"


def _kind(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def _public(owner: object) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]
