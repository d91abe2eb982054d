"""The model that a run config asks for, the same on the server and on every client."""

import threading
from collections.abc import Mapping

import torch

from fedstrat.data.clients import describe, setting, vocab_size
from fedstrat.errors import DataError
from fedstrat.local.device import place
from fedstrat.local.kept import Kept, keep
from fedstrat.models import MODELS, build
from fedstrat.models.custom import build_custom
from fedstrat.seeding import derive


def initial_model(run_config: Mapping[str, object], node_config: Mapping[str, object] | None = None) -> torch.nn.Module:
    """Build the model with the run's initial weights x_0, which follow from ``seed`` alone.

    Arguments and errors as of :func:`build_model`. Torch's global generator stays as it was.
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(derive(setting(run_config, "seed", int), "model"))
    try:
        return build_model(run_config, node_config)
    finally:
        generator.set_state(before)


def build_model(run_config: Mapping[str, object], node_config: Mapping[str, object] | None = None) -> torch.nn.Module:
    """Build ``model.name`` for the data set's shapes; weights come from torch's global generator.

    Args:
        run_config: Flat; reads ``model.*`` and ``dataset.*``.
        node_config: A client's; its private folder tells the shapes of ``npz``, ``csv`` and ``images`` data.

    Raises:
        ConfigError: There is no such model, or it can't be built for these shapes.
        DataError: The shapes aren't known here, and the model isn't a factory that can do without them.
    """
    name = setting(run_config, "model.name", str)
    hidden = _widths(str(run_config.get("model.hidden", "")))
    try:
        input_shape, num_classes = describe(run_config, node_config)
    except DataError:
        if ":" not in name:
            raise
        return build_custom(name)  # a server without data: the factory may know the shapes by itself
    return build(
        name, input_shape=input_shape, num_classes=num_classes, hidden=hidden, vocab_size=vocab_size(run_config)
    )


def client_model(
    run_config: Mapping[str, object], node_config: Mapping[str, object], *, overwritten: bool = False
) -> torch.nn.Module:
    """As :func:`initial_model`, for a client call: a built-in model is built once per thread, then set back to x_0.

    All that the built-in models hold is in their ``state_dict``, so every call finds them as good as new. One's own
    models are built anew, since they may hold more.

    Args:
        run_config: As of :func:`build_model`.
        node_config: As of :func:`build_model`.
        overwritten: Whether the call loads a whole model first, so that it needn't be set back.
    """
    name = setting(run_config, "model.name", str)
    if name not in MODELS:
        return initial_model(run_config, node_config)
    shapes, num_classes = describe(run_config, node_config)
    hidden, seed = str(run_config.get("model.hidden", "")), setting(run_config, "seed", int)
    where = tuple(run_config.get(f"train.{key}") for key in ("device", "channels-last", "compile"))
    key = (threading.get_ident(), name, hidden, shapes, num_classes, vocab_size(run_config), seed, where)
    kept = _kept.get(key)
    if kept is None:
        model = initial_model(run_config, node_config)
        place(model, run_config)
        kept = model, keep(model)
        _kept.clear()
        _kept[key] = kept
    kept[1].reset(weights=not overwritten)
    return kept[0]


_kept: dict[tuple[object, ...], tuple[torch.nn.Module, Kept]] = {}
"""The last model of this process: two clients at once must not share one, so its thread is part of the key."""


def _widths(hidden: str) -> list[int]:
    return [int(width) for width in hidden.split(",") if width.strip()]
