"""The only training loop and the only evaluation loop."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fedstrat.local.optimizer import RuleOptimizer
from fedstrat.local.rule import LocalRule, LossFunction

BatchHook = Callable[[Any], Any]


def train_epochs(
    model: torch.nn.Module,
    loader: Iterable[Any],
    optimizer: RuleOptimizer,
    rule: LocalRule[Any, Any],
    *,
    loss_fn: LossFunction,
    epochs: int,
    stop: Callable[[], bool],
    batch_hook: BatchHook | None = None,
    amp: bool = False,
) -> float | None:
    """Run local epochs under a rule.

    Args:
        model: The model, already holding the received parameters.
        loader: Yields batches (x, y).
        optimizer: The rule's optimizer.
        rule: The local rule.
        loss_fn: Mean loss of a batch, from (outputs, targets).
        epochs: Largest number of passes over the loader.
        stop: Asked at the end of every epoch.
        batch_hook: Sees every batch before it is used; what it returns (if not None) takes its place.
        amp: Whether the objective is evaluated under bfloat16 autocast; weights and gradients keep their dtype.

    Returns:
        Mean training loss over the examples of the last epoch; None if there was none.
    """
    device = device_of(model)
    objective = torch.autocast(device.type, dtype=torch.bfloat16)(rule.loss) if amp else rule.loss
    mean_loss = None
    for _ in range(epochs):
        model.train()
        total, seen = torch.zeros((), device=device), 0
        for batch in loader:
            replaced = None if batch_hook is None else batch_hook(batch)
            x, y = (part.to(device) for part in (batch if replaced is None else replaced))
            loss = optimizer.step(functools.partial(objective, model, x, y, loss_fn))
            total += loss.detach() * len(y)
            seen += len(y)
        if seen:
            mean_loss = float(total) / seen
        if stop():
            break
    return mean_loss


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: Iterable[Any], *, loss_fn: LossFunction) -> tuple[int, float, int]:
    """Count over all batches; ratios are taken last, by whoever adds clients up.

    Returns:
        (number of correct predictions, sum of losses over examples, number of examples).
    """
    device = device_of(model)
    sizes, losses, hits = [], [], []
    with evaluating(model):
        for batch in loader:
            x, y = (part.to(device) for part in batch)
            outputs = model(x)
            losses.append(loss_fn(outputs, y))
            hits.append((outputs.argmax(dim=1) == y).sum())
            sizes.append(len(y))
    # Read at the end, so that a GPU isn't waited for at every batch.
    loss_sum = sum((float(loss) * size for loss, size in zip(losses, sizes, strict=True)), 0.0)
    return sum(map(int, hits)), loss_sum, sum(sizes)


def full_gradient(
    model: torch.nn.Module,
    params: Mapping[str, torch.nn.Parameter],
    loader: Iterable[Any],
    loss_fn: LossFunction,
) -> dict[str, torch.Tensor]:
    """Return ``grad f_i`` at the model's current weights over all local data.

    Sums of per-example losses divided by n_i, in evaluation mode (no dropout, no batch statistics, running
    statistics untouched). The random state is put back, so a pass changes nothing that comes after it.
    """
    device = device_of(model)
    saved = {n: p.grad for n, p in params.items()}
    total = {n: torch.zeros_like(p) for n, p in params.items()}
    seen = 0
    with evaluating(model), same_randomness(loader):
        for batch in plain(loader):
            x, y = (part.to(device) for part in batch)
            for p in params.values():
                p.grad = None
            with torch.enable_grad():
                torch.autograd.backward(loss_fn(model(x), y) * len(y))
            for n, p in params.items():
                if p.grad is not None:
                    total[n] += p.grad
            seen += len(y)
    for n, p in params.items():
        p.grad = saved[n]
    return {n: t / max(seen, 1) for n, t in total.items()}


def plain(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader's data in its own order and without augmentation, where it can tell."""
    unchanged = getattr(loader, "plain", None)
    return unchanged() if callable(unchanged) else loader


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back into each module's own mode."""
    modes = [(module, module.training) for module in model.modules()]
    if any(training for _, training in modes):
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            if module.training is not mode:
                module.training = mode


@contextmanager
def same_randomness(loader: Iterable[Any]) -> Iterator[None]:
    """Put the global and the loader's random state back afterwards."""
    owners = (loader, getattr(loader, "sampler", None))
    generators = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    before, own = torch.get_rng_state(), [g.get_state() for g in generators]
    try:
        yield
    finally:
        torch.set_rng_state(before)
        for generator, state in zip(generators, own, strict=True):
            generator.set_state(state)


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of a model's first parameter; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
