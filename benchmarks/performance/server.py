"""The server's step, the wire and FedCSPACK's mathematics, each against the obvious way to do it."""

import functools
import math
from collections.abc import Iterator

import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

import fedstrat
from benchmarks.performance.problems import Tensors, exchange_of, parameters, trained
from benchmarks.performance.timing import Row, alternate
from fedstrat.aggregation.conflict import solve
from fedstrat.aggregation.groups import activity_threshold, group_direction, group_names
from fedstrat.aggregation.packs import merge, select, to_packs
from fedstrat.payloads import decode

FLOWER = "Flower's own"


def craft(x: Tensors, ys: list[Tensors], previous: Tensors) -> None:
    """CRAFT's directions, layer by layer."""
    weights = torch.full((len(ys),), 1.0 / len(ys), dtype=torch.float64)
    for names in group_names(x, "layer").values():
        closed_form = functools.partial(solve, weights=weights, min_norm=activity_threshold(x, names, 1e-6))
        group_direction(x, ys, names, previous, closed_form)


def naive_craft(x: Tensors, ys: list[Tensors], previous: Tensors) -> None:
    """The same by the pseudo-inverse of the stacked displacements of a layer, in float64."""
    weights = torch.full((len(ys),), 1.0 / len(ys), dtype=torch.float64)
    for names in group_names(x, "layer").values():
        D = torch.stack([torch.cat([(y[n].double() - x[n].double()).flatten() for n in names]) for y in ys])
        r = torch.cat([previous[n].double().flatten() for n in names])
        U, r = D / D.norm(dim=1, keepdim=True), r / r.norm()
        _ = r + torch.linalg.pinv(U) @ (weights - U @ r)


def aggregate_with(strategy: str, x: Tensors, ys: list[Tensors], repeats: int) -> tuple[float, float]:
    """A whole ``aggregate_train``, from received bytes to the model to be sent, ours and Flower's FedAvg."""
    model, sent, replies = exchange_of(x, ys)
    mine = getattr(fedstrat, strategy)()
    mine._adopt(model)  # once a run: finds tied weights, which reads every number

    def ours() -> None:
        mine._sent = sent
        if mine.aggregate_train(1, replies)[0] is None:
            raise RuntimeError("no step was taken")

    def theirs() -> None:
        flower = FlowerFedAvg()
        flower.current_arrays = model
        flower.aggregate_train(1, replies)

    return alternate(ours, theirs, repeats)


def aggregation(*, quick: bool) -> Iterator[Row]:
    sizes = [("resnet20", 10), ("resnet20", 50)] if quick else [("resnet20", 10), ("resnet20", 50), ("resnet20", 100)]
    for model, m in sizes:
        x = parameters(model)
        ys, previous = trained(x, m), trained(x, 1)[0]
        once = functools.partial(craft, x, ys, previous), functools.partial(naive_craft, x, ys, previous)
        yield Row(
            f"CRAFT directions, {model}, m = {m}", *alternate(*once, 1), "pinv per layer", 10 if m == 100 else None
        )
        yield Row(f"FedAvg aggregate_train, {model}, m = {m}", *aggregate_with("FedAvg", x, ys, 3), FLOWER, 3)
    yield from large(10)
    x = parameters("resnet18")
    for m in (10,) if quick else (10, 50):
        pair = aggregate_with("FedAvg", x, trained(x, m), 2)
        yield Row(f"FedAvg aggregate_train, resnet18, m = {m}", *pair, FLOWER, 3)


def large(m: int = 30) -> Iterator[Row]:
    x = parameters("resnet18")
    ys, previous = trained(x, m), trained(x, 1)[0]
    once = functools.partial(craft, x, ys, previous), functools.partial(naive_craft, x, ys, previous)
    pair = alternate(*once, 1, warm=False)
    yield Row(f"CRAFT directions, resnet18, m = {m}", *pair, "pinv per layer", 20)


def naive_select(w: Tensors, x: Tensors, size: int) -> None:
    """FedCSPACK's selection as a loop over packs."""
    a, b = torch.cat([t.flatten() for t in w.values()]), torch.cat([t.flatten() for t in x.values()])
    everywhere = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0)
    for start in range(0, len(a), size):
        p, q = a[start : start + size].double(), b[start : start + size].double()
        theta = torch.nn.functional.cosine_similarity(p, q, dim=0)
        if theta < everywhere:
            kappa = torch.nn.functional.kl_div(p.log_softmax(0), q.log_softmax(0), reduction="sum", log_target=True)
            _ = (kappa + theta).abs()


def naive_merge(x: torch.Tensor, sent: list[tuple[torch.Tensor, ...]]) -> None:
    """FedCSPACK's aggregation as a loop over clients and packs."""
    total, moved = torch.zeros(len(x), dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    for index, weight, value in sent:
        for i, m, v in zip(index.tolist(), weight.tolist(), value, strict=True):
            total[i] += m
            moved[i] += m * v.double()
    _ = torch.where(total[:, None] > 0, x + moved / total.clamp(min=1e-12)[:, None], x)


def packs(*, quick: bool) -> Iterator[Row]:
    for model in ("resnet20",) if quick else ("resnet20", "resnet18"):
        x = parameters(model)
        w = trained(x, 1)[0]
        ours = functools.partial(lambda w, x: select(to_packs(w, 1024), to_packs(x, 1024)), w, x)
        pair = alternate(ours, functools.partial(naive_select, w, x, 1024), 2)
        yield Row(f"FedCSPACK selection, {model}", *pair, "loop over packs", 4)
    x = parameters("resnet20")
    before = to_packs(x, 1024)
    sent = []
    for y in trained(x, 50):
        after = to_packs(y, 1024)
        chosen = select(after, before)
        rows = chosen.index.long()
        sent.append((chosen.index, chosen.weight, after[rows] - before[rows]))
    pair = alternate(lambda: merge(before, sent, content="delta"), lambda: naive_merge(before, sent), 2)
    yield Row("FedCSPACK aggregation, resnet20, m = 50", *pair, "loop over packs", 8)


def wire(*, quick: bool) -> Iterator[Row]:
    for model in ("resnet20",) if quick else ("resnet20", "resnet18"):
        x = parameters(model)
        record = fedstrat.to_arrays(x)
        pair = alternate(lambda: fedstrat.to_arrays(x), lambda: ArrayRecord(x), 5)  # noqa: B023 - called here
        yield Row(f"encode, {model}", *pair, FLOWER)
        pair = alternate(lambda: decode(record, "arrays"), record.to_torch_state_dict, 5)  # noqa: B023
        yield Row(f"decode, {model}", *pair, FLOWER)
        size = sum(p.numel() for p in x.values())
        flat = {"model": torch.cat([p.flatten() for p in x.values()])}
        pair = alternate(lambda: fedstrat.to_arrays(flat), lambda: fedstrat.to_arrays(x), 5)  # noqa: B023
        yield Row(f"encode as one array ({math.ceil(size / 1e6)} M numbers), {model}", *pair, "an array per parameter")
