"""FedCSPACK: packs, weights and merging; what travels; what clients hold after rounds without them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import nn
from torch.nn.functional import cross_entropy

import fedstrat
from fedstrat import FedAvg, FedCSPACK
from fedstrat.aggregation.packs import divergences, from_packs, merge, num_packs, select, to_packs
from fedstrat.errors import ConfigError
from fedstrat.local.state import open_store, peek
from fedstrat.metrics.traffic import array_payload_bytes
from fedstrat.payloads import decode, raw_array, view
from fedstrat.strategies import ALGORITHMS
from tests.reference import fedcspack as reference
from tests.strategies import small
from tests.strategies.small import CLASSES, CLIENTS, FEATURES, Recorder, bits, replaced, start

PACK = 4
NUM_PARAMS = 6 * 8 + 8 + 8 * 3 + 3  # 83: the last of 21 packs holds 3
NUM_PACKS = 21


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two layers, no buffers, no randomness."""
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return model.to(dtype)


def double() -> nn.Module:
    return net(torch.float64)


def wide(client: int, examples: int | None = None) -> small.Loader:
    return small.batches(client, dtype=torch.float64, examples=examples)


def strategy(**settings: Any) -> FedCSPACK:
    return FedCSPACK(**{"pack_size": PACK, "fraction_evaluate": 0.0, "seed": 3, **settings})


def packs_of(record: RecordDict) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in decode(record["packs"], "packs").items()}


def vector(arrays: ArrayRecord) -> np.ndarray:
    """Parameters as they are, flat, in their own dtype."""
    return np.concatenate([t.numpy().ravel() for t in decode(arrays, "model").values()])


def packed(flat: np.ndarray, size: int = PACK) -> torch.Tensor:
    return to_packs({"x": torch.from_numpy(flat)}, size)


def away(absences: dict[str, set[int]]) -> Callable[[Recorder], Callable[[Any], None]]:
    """Takes clients off the grid before the rounds in which they are absent, and brings them back."""

    def watch(grid: Recorder) -> Callable[[Any], None]:
        everybody = dict(grid.contexts)

        def next_round(report: Any) -> None:
            for node, context in everybody.items():
                grid.contexts.pop(node, None)
                if report.round + 1 not in absences.get(str(context.node_config["partition-id"]), set()):
                    grid.contexts[node] = context

        return next_round

    return watch


# --- cutting and putting together ------------------------------------------------------------------------------------


def test_every_size_is_cut_and_put_together() -> None:
    """Sizes below a pack, whole multiples, and those that the number of packs divides but the pack size doesn't."""
    met = set()
    for size in range(1, 40):
        for pack_size in (1, 2, 3, 4, 7, 16, 64):
            flat = torch.arange(1.0, size + 1)
            packs = to_packs({"a": flat[: size // 3], "b": flat[size // 3 :]}, pack_size)
            count = -(-size // pack_size)
            assert packs.shape == (count, pack_size)
            assert num_packs(size, pack_size) == count
            padding = count * pack_size - size
            np.testing.assert_array_equal(packs.ravel().numpy(), np.append(np.arange(1, size + 1), np.zeros(padding)))
            assert packs.data_ptr() != flat.data_ptr()  # a copy, also where nothing is padded
            again = from_packs(packs, {"a": flat[: size // 3], "b": flat[size // 3 :].reshape(1, -1)})
            assert torch.equal(torch.cat([again["a"], again["b"][0]]), flat)
            met.add((size < pack_size, padding > 0, size % count == 0))
    # Padding goes by the size of a pack, also where the number of packs divides the size.
    assert {(True, True, True), (False, True, True), (False, False, True), (False, True, False)} == met


def test_all_weights_of_one_pack_stay() -> None:
    """One pack has the cosine of the whole: it is never below it, so nothing is sent and x never moves."""
    run = start(strategy(pack_size=NUM_PARAMS + 1), grid := Recorder(small.client_app(net)), net)
    assert bits(run.result.arrays) == bits(run.models[0])
    for trip in grid.trips:
        assert packs_of(trip.reply)["index"].size == 0
    assert [r.traffic.train_up_payload for r in run.reports] == [0, 0, 0]
    assert [r.traffic.train_down_payload for r in run.reports] == [5 * 4 * NUM_PARAMS, 0, 0]  # first contact alone
    assert [r.aggregated for r in run.reports] == [True, True, True]  # an empty reply is a valid one


def test_packs_of_one_number_send_what_changed_sign() -> None:
    x = torch.tensor([[1.0], [-2.0], [3.0], [-4.0], [0.5]])
    w = torch.tensor([[1.5], [2.0], [-3.0], [-4.0], [0.1]])
    assert select(w, x).index.tolist() == [1, 2]


def test_the_most_turned_candidates_are_sent() -> None:
    """Angles of 10, 60, 30, 60, 80, 0 degrees to x; equal ones in the order of their numbers."""
    angles = np.radians([10, 60, 30, 60, 80, 0])
    x = torch.tensor([[1.0, 0.0]] * 6, dtype=torch.float64)
    w = torch.tensor(np.column_stack([np.cos(angles), np.sin(angles)]))
    # cos(w, x) is the mean of the cosines, .67: angles of 48 degrees and more are candidates.
    assert select(w, x).index.tolist() == [1, 3, 4]
    assert select(w, x, top_k=2).index.tolist() == [1, 4]
    assert select(w, x, top_k=9).index.tolist() == [1, 3, 4]
    assert select(w, x, keep_ratio=0.2).index.tolist() == [1, 4]  # ceil(1.2)
    assert select(w, x, keep_ratio=1 / 6).index.tolist() == [4]
    assert select(w, x, weights="full", top_k=1).index.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_an_unchanged_model_nothing_is_sent(dtype: torch.dtype) -> None:
    """All cosines are 1 whatever the sums round to: neither is below the other."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        x = torch.randn(7, 3, generator=generator).to(dtype)
        assert select(x, x).index.tolist() == []
        assert select(2 * x, x).index.tolist() == []


def test_a_pack_that_is_zero_in_both_models_is_never_sent_and_shifts_nothing() -> None:
    x = torch.tensor([[10.0, 10.0], [0.0, 0.0], [1.0, 2.0], [3.0, 1.0]])
    w = torch.tensor([[10.0, 9.0], [0.0, 0.0], [2.0, 1.0], [1.0, 3.0]])
    chosen = select(w, x)
    assert chosen.index.tolist() == [2, 3]
    assert bool((chosen.weight > 0).all())
    moved, changed = merge(x, [(chosen.index, chosen.weight, (w - x)[2:])], content="delta")
    assert changed.tolist() == [False, False, True, True]
    torch.testing.assert_close(moved, torch.cat([x[:2], w[2:]]))
    # A pack that one side alone has zero says something: its cosine is 0.
    assert select(torch.tensor([[1.0, 1.0], [0.0, 0.1]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])).index.tolist() == [1]


def test_frozen_zero_packs_shift_nothing_in_a_run() -> None:
    """The first layer is zero and so are its gradients' packs at a zero second layer: alignment must hold."""

    def zeroed() -> nn.Module:
        model = net(torch.float64)
        with torch.no_grad():
            model[2].weight.zero_()  # the first layer has no gradient in the first step
            model[0].bias.zero_()
        return model

    seen: dict[str, np.ndarray] = {}

    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        optimizer = session.optimizer(lr=0.1)
        x, y = wide(client)[0]
        optimizer.step(lambda: cross_entropy(model(x), y))
        seen[str(client)] = torch.cat([p.detach().ravel() for p in model.parameters()]).numpy()

    run = start(strategy(), grid := Recorder(small.own_loop(zeroed, steps), 2), zeroed, 1)
    x = vector(run.models[0])
    expected = packed(x).clone()
    parts = [packs_of(trip.reply) for trip in grid.trips]
    zero = {j for j in range(NUM_PACKS) if not expected[j].any()}
    still_zero = {j for j in zero if not any(packed(seen[c])[j].any() for c in seen)}
    assert still_zero
    for part in parts:
        assert not still_zero & set(part["index"].tolist())
    for j in range(NUM_PACKS):
        shares = [
            (p["weight"][p["index"] == j], packed(seen[t.client])[j]) for t, p in zip(grid.trips, parts, strict=True)
        ]
        shares = [(float(m[0]), w) for m, w in shares if len(m)]
        if shares:
            expected[j] = sum(m * w for m, w in shares) / sum(m for m, _ in shares)
    np.testing.assert_allclose(vector(run.result.arrays), expected.ravel()[:NUM_PARAMS], rtol=1e-10)


# --- weights ---------------------------------------------------------------------------------------------------------


def test_weights_of_negative_cosines_are_positive() -> None:
    """x and w point apart: |theta| for "cosine", |kappa + theta| for "dual", never below 1e-12."""
    x = torch.tensor([[1.0, 2.0], [1.0, 1.0], [1.0, 0.0], [9.0, 9.0]], dtype=torch.float64)
    w = torch.tensor([[-1.0, -2.0], [-1.0, -0.9], [0.0, 1.0], [9.0, 9.0]], dtype=torch.float64)
    theta = [-1.0, -1.9 / (np.sqrt(2) * np.sqrt(1.81)), 0.0]

    def softmax(a: np.ndarray) -> np.ndarray:
        return np.exp(a) / np.exp(a).sum()

    kappa = [
        float((softmax(b) * np.log(softmax(b) / softmax(a))).sum())
        for a, b in zip(w.numpy()[:3], x.numpy()[:3], strict=True)
    ]
    for name, expected in {
        "cosine": np.abs(theta),
        "kl": np.abs(kappa),
        "dual": np.abs(np.add(theta, kappa)),
    }.items():
        chosen = select(w, x, weights=name)  # type: ignore[arg-type]
        assert chosen.index.tolist() == [0, 1, 2]
        np.testing.assert_allclose(chosen.weight.numpy(), np.maximum(expected, 1e-12).astype(np.float32), rtol=1e-6)
        assert bool((chosen.weight > 0).all())
    assert select(w, x, weights="cosine").weight[2] == np.float32(1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 1e-4])
def test_the_divergences_of_many_packs_are_those_of_every_pack_alone(temperature: float, dtype: type) -> None:
    """More packs than are computed at one time; at the smallest T, exp(x / T) overflows and most of p is 0."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(333, 500)).astype(dtype)
    w = (x + 0.1 * rng.normal(size=x.shape)).astype(dtype)
    index = np.flatnonzero(rng.random(len(x)) < 0.8)

    def log_softmax(packs: np.ndarray) -> np.ndarray:
        a = packs[index].astype(np.longdouble) / np.longdouble(temperature)
        a -= a.max(1, keepdims=True)
        return a - np.log(np.exp(a).sum(1, keepdims=True))

    log_p, log_q = log_softmax(x), log_softmax(w)
    expected = (np.exp(log_p) * (log_p - log_q)).sum(1)
    kappa = divergences(torch.from_numpy(w), torch.from_numpy(x), torch.from_numpy(index), temperature)
    assert kappa.shape == (len(index),)
    np.testing.assert_allclose(kappa.numpy(), expected.astype(np.float64), rtol=1e-11, atol=1e-14 / temperature)


def test_the_whole_choice_is_that_of_the_reference_where_packs_are_many() -> None:
    rng = np.random.default_rng(8)
    x = rng.normal(size=(301, 300)).astype(np.float32)
    w = (x + 0.3 * rng.normal(size=x.shape) * rng.random((301, 1))).astype(np.float32)
    for settings in ({}, {"weights": "kl"}, {"weights": "cosine", "top_k": 40}, {"keep_ratio": 0.6}):
        chosen = select(torch.from_numpy(w), torch.from_numpy(x), kl_temperature=0.5, **settings)
        expected = reference.select(w, x, temperature=0.5, **{"weights": "dual", **settings})
        assert chosen.index.tolist() == list(expected)
        assert 30 < len(expected) < 301
        np.testing.assert_allclose(chosen.weight.numpy(), list(expected.values()), rtol=2e-7)  # an ulp of float32


def test_a_weight_where_kappa_is_minus_theta_stays_positive() -> None:
    """KL grows without bound as w turns away, so somewhere it cancels the cosine: still a weight."""

    def dual(scale: float) -> torch.Tensor:
        x = torch.tensor([[1.0, 0.5], [1.0, 1.0]], dtype=torch.float64)
        return select(torch.tensor([[-scale, -0.1], [1.0, 1.0]], dtype=torch.float64), x).weight

    low, high = 0.1, 10.0
    signed = {s: _signed(s) for s in (low, high)}
    assert signed[low] < 0 < signed[high]
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _signed(middle) < 0 else (low, middle)
    assert 0 < dual(middle)[0] < 1e-6


def _signed(scale: float) -> float:
    x, w = np.array([1.0, 0.5]), np.array([-scale, -0.1])
    p, q = np.exp(x) / np.exp(x).sum(), np.exp(w) / np.exp(w).sum()
    return float((p * np.log(p / q)).sum() + x @ w / np.linalg.norm(x) / np.linalg.norm(w))


def test_shares_of_a_pack_sum_to_one_and_only_ratios_count() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, PACK, generator=generator)
    index = [torch.tensor(i, dtype=torch.int32) for i in ([0, 2, 5], [2, 3, 5], [5])]
    weight = [torch.rand(len(i), generator=generator) + 0.01 for i in index]
    same = torch.randn(6, PACK, generator=generator)
    rows = [same[i.long()] for i in index]
    moved, changed = merge(x, list(zip(index, weight, rows, strict=True)), content="weights")
    assert changed.tolist() == [True, False, True, True, False, True]
    torch.testing.assert_close(moved, torch.where(changed[:, None], same, x))

    values = [torch.randn(len(i), PACK, generator=generator) for i in index]
    once, _ = merge(x, list(zip(index, weight, values, strict=True)), content="delta")
    eight_times, _ = merge(x, list(zip(index, [8 * m for m in weight], values, strict=True)), content="delta")
    assert torch.equal(once, eight_times)  # powers of two round nothing
    thrice, _ = merge(x, list(zip(index, [3 * m for m in weight], values, strict=True)), content="delta")
    torch.testing.assert_close(once, thrice)


@pytest.mark.parametrize("weights", ["dual", "cosine", "kl", "full"])
def test_every_number_lies_between_those_of_its_contributors(weights: str) -> None:
    run = start(strategy(weights=weights, kl_temperature=0.1), grid := Recorder(small.client_app(double, wide)), double)
    for t in (1, 2, 3):
        x, after = packed(vector(run.models[t - 1])), packed(vector(run.models[t]))
        low, high = torch.full_like(x, torch.inf), torch.full_like(x, -torch.inf)
        for trip in grid.of(t):
            parts = {n: torch.from_numpy(a) for n, a in packs_of(trip.reply).items()}
            rows = parts["index"].long()
            w = x[rows] + parts["value"]
            low[rows], high[rows] = torch.minimum(low[rows], w), torch.maximum(high[rows], w)
        sent = torch.isfinite(low)
        assert torch.equal(after[~sent], x[~sent])
        assert bool((after[sent] >= low[sent] - 1e-12).all())
        assert bool((after[sent] <= high[sent] + 1e-12).all())


# --- against plain averaging -----------------------------------------------------------------------------------------


def test_full_is_the_unweighted_mean() -> None:
    equal = Recorder(small.client_app(double, lambda client: wide(client, 8)))
    full = start(strategy(weights="full", downlink="dense"), equal, double)
    plain = small.run(
        FedAvg(fraction_evaluate=0.0, seed=3), double, loader=lambda client: wide(client, 8)
    )  # equal sizes: FedAvg's mean is unweighted
    np.testing.assert_allclose(vector(full.result.arrays), vector(plain.result.arrays), rtol=1e-12)

    unequal = Recorder(small.client_app(double, wide))
    run = start(strategy(weights="full"), unequal, double, 1)
    deltas = [packs_of(trip.reply)["value"].ravel()[:NUM_PARAMS] for trip in unequal.trips]
    np.testing.assert_allclose(vector(run.result.arrays), vector(run.models[0]) + np.mean(deltas, axis=0), rtol=1e-12)


@pytest.mark.parametrize("downlink", ["synced", "mask", "dense"])
@pytest.mark.parametrize("weights", ["full", "dual"])
def test_of_one_client_the_packs_it_sent_are_its_own(weights: str, downlink: str) -> None:
    models: list[np.ndarray] = []

    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        optimizer = session.optimizer(lr=0.1)
        for x, y in small.batches(client):
            optimizer.step(lambda x=x, y=y: cross_entropy(model(x), y))
        models.append(torch.cat([p.detach().ravel() for p in model.parameters()]).numpy().copy())

    settings = {"min_train_nodes": 1, "min_available_nodes": 1, "weights": weights, "downlink": downlink}
    run = start(strategy(**settings), grid := Recorder(small.own_loop(net, steps), 1), net)
    for t, model in enumerate(models, start=1):
        x, after, w = packed(vector(run.models[t - 1])), packed(vector(run.models[t])), packed(model)
        rows = packs_of(grid.of(t)[0].reply)["index"].astype(int)
        rest = np.setdiff1d(np.arange(NUM_PACKS), rows)
        assert len(rows) == NUM_PACKS if weights == "full" else 0 < len(rows) < NUM_PACKS
        # A difference in float32 costs an ulp; weights come as they are.
        torch.testing.assert_close(after[rows], w[rows], rtol=0 if downlink == "mask" else 1e-6, atol=0)
        assert torch.equal(after[rest], x[rest])


# --- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("downlink", ["synced", "mask", "dense"])
def test_bytes_are_those_of_packs_indices_and_weights(downlink: str) -> None:
    """4 K (B + 2) up; down 4 d at first contact (always: dense), then 4 K (B + 1)."""
    run = start(strategy(keep_ratio=0.2, downlink=downlink), grid := Recorder(small.client_app(net)), net, 4)
    for report in run.reports:
        up = down = 0
        for trip in grid.of(report.round):
            k = len(packs_of(trip.reply)["index"])
            assert k <= 5  # ceil(0.2 * 21)
            expected = 4 * k * (PACK + 2)
            assert sum(array_payload_bytes(a) for a in trip.reply["packs"].values()) == expected
            assert not trip.reply["buffers"]
            assert "arrays" not in trip.reply
            up += expected
            if downlink == "dense" or report.round == 1:
                assert "packs" not in trip.sent
                down += 4 * NUM_PARAMS
            else:
                assert "arrays" not in trip.sent
                down += 4 * len(packs_of(trip.sent)["index"]) * (PACK + 1)
        assert report.traffic.train_up_payload == up
        assert report.traffic.train_down_payload == down
        assert report.traffic.train_dense_payload == 2 * 5 * 4 * NUM_PARAMS


def test_synced_sends_what_anybody_sent_since_the_clients_own_last_round() -> None:
    grid = Recorder(small.client_app(net))
    run = start(strategy(keep_ratio=0.1), grid, net, 5, on_round=away({"0": {2, 3, 4}})(grid))
    sent = {t: [set(packs_of(s.reply)["index"].tolist()) for s in grid.of(t)] for t in range(1, 6)}
    (back,) = [trip for trip in grid.of(5) if trip.client == "0"]
    told = packs_of(back.sent)
    assert set(told["index"].tolist()) == set().union(*(s for t in (1, 2, 3, 4) for s in sent[t]))
    np.testing.assert_array_equal(told["value"], packed(vector(run.models[4]))[told["index"].astype(int)])
    (other,) = [trip for trip in grid.of(5) if trip.client == "1"]
    assert set(packs_of(other.sent)["index"].tolist()) == set().union(*sent[4])


def test_mask_sends_the_last_rounds_packs_to_everybody() -> None:
    grid = Recorder(small.client_app(net))
    start(strategy(keep_ratio=0.1, downlink="mask"), grid, net, 5, on_round=away({"0": {2, 3, 4}})(grid))
    last = set().union(*(packs_of(s.reply)["index"].tolist() for s in grid.of(4)))
    for trip in grid.of(5):
        assert set(packs_of(trip.sent)["index"].tolist()) == last


@pytest.mark.parametrize("downlink", ["synced", "mask"])
def test_a_clients_packs_are_clipped_together(downlink: str) -> None:
    """One client: x moves by what it sent, at most max_update_norm long."""
    settings = {"min_train_nodes": 1, "min_available_nodes": 1, "downlink": downlink}
    whole = start(strategy(**settings), Recorder(small.client_app(double, wide), 1), double, 1)
    step = vector(whole.models[1]) - vector(whole.models[0])
    for share in (0.25, 1.5):
        bound = share * float(np.linalg.norm(step))
        limited = strategy(**settings, max_update_norm=bound)
        run = start(limited, Recorder(small.client_app(double, wide), 1), double, 1)
        moved = vector(run.models[1]) - vector(run.models[0])
        np.testing.assert_allclose(moved, min(share, 1.0) * step, rtol=1e-9, atol=1e-15)


# --- what a client holds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("downlink", ["synced", "mask"])
def test_an_absent_client_holds_what_it_was_sent_and_its_own_elsewhere(downlink: str) -> None:
    """Against clients that keep dense models of their own and overwrite the masked positions: equal bits."""
    begun: dict[tuple[int, str], np.ndarray] = {}

    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        flat = torch.cat([p.detach().ravel() for p in model.parameters()]).numpy().copy()
        begun[session.server_round, str(client)] = flat
        optimizer = session.optimizer(lr=0.1)
        for x, y in small.batches(client):
            optimizer.step(lambda x=x, y=y: cross_entropy(model(x), y))

    algorithm = strategy(keep_ratio=0.1, downlink=downlink)
    grid = Recorder(small.own_loop(net, steps))
    run = start(algorithm, grid, net, 6, on_round=away({"0": {2, 3, 4}, "3": {5}})(grid))

    twins: dict[str, np.ndarray] = {}
    known: dict[str, np.ndarray] = {}
    for trip in grid.trips:
        if "arrays" in trip.sent:
            twins[trip.client] = vector(trip.sent["arrays"]).copy()
            known[trip.client] = twins[trip.client].copy()
        else:
            told = packs_of(trip.sent)
            for j, value in zip(told["index"], told["value"], strict=True):
                for position in range(j * PACK, min((j + 1) * PACK, NUM_PARAMS)):
                    twins[trip.client][position] = known[trip.client][position] = value[position - j * PACK]
        np.testing.assert_array_equal(begun[trip.round, trip.client], twins[trip.client])
        if downlink == "synced":
            np.testing.assert_array_equal(known[trip.client], vector(run.models[trip.round - 1]))
        # Plain training of the twin.
        model = net()
        nn.utils.vector_to_parameters(torch.from_numpy(twins[trip.client]), model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in small.batches(int(trip.client)):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        twins[trip.client] = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()

    assert {trip.round for trip in grid.trips if trip.client == "0"} == {1, 5, 6}
    for context in grid.contexts.values():
        client = str(small.client_of(context))
        state = peek(open_store(context, algorithm.experiment_id, client), algorithm.accepted[client])
        assert state is not None
        own = np.concatenate([t.numpy().ravel() for n, t in state.items() if n.startswith("personal/")])
        np.testing.assert_array_equal(own, twins[client])
        np.testing.assert_array_equal(state["known"].numpy().ravel()[:NUM_PARAMS], known[client])


def test_back_after_four_rounds_the_start_is_a_mixture() -> None:
    """In round 5 some entries are the global ones and others are the client's own of round 1, and they differ."""
    begun: dict[int, np.ndarray] = {}
    ended: dict[int, np.ndarray] = {}

    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        optimizer = session.optimizer(lr=0.1)
        if client == 0:
            begun[session.server_round] = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
        for x, y in small.batches(client):
            optimizer.step(lambda x=x, y=y: cross_entropy(model(x), y))
        if client == 0:
            ended[session.server_round] = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()

    grid = Recorder(small.own_loop(net, steps))
    run = start(strategy(keep_ratio=0.05), grid, net, 5, on_round=away({"0": {2, 3, 4}})(grid))
    (back,) = [trip for trip in grid.of(5) if trip.client == "0"]
    told = np.isin(np.arange(NUM_PARAMS) // PACK, packs_of(back.sent)["index"])
    assert 0 < told.sum() < NUM_PARAMS
    x = vector(run.models[4])
    np.testing.assert_array_equal(begun[5][told], x[told])
    np.testing.assert_array_equal(begun[5][~told], ended[1][~told])
    assert np.abs(ended[1] - x)[~told].max() > 1e-3


# --- mishaps ---------------------------------------------------------------------------------------------------------


def same_run(a: tuple[small.Run, Recorder], b: tuple[small.Run, Recorder], rounds: range) -> None:
    """Equal models after every round, and equal messages to everybody."""
    for t in rounds:
        assert bits(a[0].models[t]) == bits(b[0].models[t]), f"round {t}"
        told = [
            {s.client: {n: bits(r) for n, r in s.sent.array_records.items()} for s in g.of(t)} for g in (a[1], b[1])
        ]
        for client in told[0].keys() & told[1].keys():
            assert told[0][client] == told[1][client], f"round {t}, client {client}"


@pytest.mark.parametrize("downlink", ["synced", "mask", "dense"])
def test_a_lost_reply_is_as_if_the_client_had_been_away(downlink: str) -> None:
    def lose(t: int, client: str, content: RecordDict) -> RecordDict | None:
        return None if (t, client) == (3, "2") else content

    settings = {"keep_ratio": 0.2, "downlink": downlink}
    lost = Recorder(small.client_app(net), alter=lose)
    absent = Recorder(small.client_app(net))
    a = start(strategy(**settings), lost, net, 5), lost
    b = start(strategy(**settings), absent, net, 5, on_round=away({"2": {3}})(absent)), absent
    assert a[0].reports[2].failed == {"2": "no reply in time"}
    same_run(a, b, range(1, 6))


@pytest.mark.parametrize("downlink", ["synced", "mask"])
def test_a_client_that_lost_its_state_says_so_and_gets_everything(downlink: str) -> None:
    """The round goes on without it, all others are told what they'd have been told, and it begins anew."""

    def forget(grid: Recorder) -> Callable[[Any], None]:
        def clear(report: Any) -> None:
            if report.round == 3:
                (context,) = [c for c in grid.contexts.values() if small.client_of(c) == 2]
                context.state = RecordDict()

        return clear

    settings = {"keep_ratio": 0.2, "downlink": downlink}
    careless, absent = Recorder(small.client_app(net)), Recorder(small.client_app(net))
    a = start(strategy(**settings), careless, net, 5, on_round=forget(careless)), careless
    b = start(strategy(**settings), absent, net, 5, on_round=away({"2": {4}})(absent)), absent
    (fourth,) = [s for s in careless.of(4) if s.client == "2"]
    assert fourth.reply["client"]["state"] == "lost"
    assert set(fourth.reply) == {"metrics", "client"}
    assert a[0].reports[3].failed == {}
    assert a[0].reports[3].trained == ("0", "1", "3", "4")
    same_run(a, b, range(1, 5))
    (fifth,) = [s for s in careless.of(5) if s.client == "2"]
    assert bits(fifth.sent["arrays"]) == bits(a[0].models[4])
    assert fifth.reply["client"]["state"] == "ok"
    others = [{s.client: bits(s.sent["packs"]) for s in g.of(5) if s.client != "2"} for g in (careless, absent)]
    assert others[0] == others[1]


def test_duplicates_count_once() -> None:
    twice = Recorder(small.client_app(net), arrange=lambda replies: [*replies, *replies])
    once = Recorder(small.client_app(net))
    a, b = start(strategy(keep_ratio=0.2), twice, net, 4), start(strategy(keep_ratio=0.2), once, net, 4)
    same_run((a, twice), (b, once), range(1, 5))


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[RecordDict], RecordDict]:
    def alter(content: RecordDict) -> RecordDict:
        packs = dict(content["packs"].items())
        packs[name] = raw_array(change(view(packs[name], name).clone()))
        return replaced(content, packs=ArrayRecord(packs))

    return alter


def put(position: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[position] = value
        return tensor

    return change


def without(record: str, *names: str) -> Callable[[RecordDict], RecordDict]:
    def alter(content: RecordDict) -> RecordDict:
        kept = {n: a for n, a in content[record].items() if n not in names} if names else None
        whole = {n: r for n, r in content.items() if n != record}
        return RecordDict(whole | ({} if kept is None else {record: ArrayRecord(kept)}))

    return alter


MALFORMED = {
    "beyond the last pack": (changed("index", put(-1, NUM_PACKS)), "packs/index"),
    "below 0": (changed("index", put(0, -1)), "packs/index"),
    "not ascending": (changed("index", lambda i: i.flip(0)), "packs/index"),
    "twice": (changed("index", lambda i: torch.cat([i[:1], i[:-1]])), "packs/index"),
    "int64": (changed("index", lambda i: i.long()), "int32"),
    "two dimensions": (changed("index", lambda i: i[:, None]), "int32"),
    "weight 0": (changed("weight", put(0, 0.0)), "packs/weight"),
    "weight below 0": (changed("weight", put(0, -0.5)), "packs/weight"),
    "weight NaN": (changed("weight", put(0, float("nan"))), "packs/weight"),
    "weight infinite": (changed("weight", put(0, float("inf"))), "packs/weight"),
    "weight float64": (changed("weight", lambda m: m.double()), "packs/weight"),
    "a weight too few": (changed("weight", lambda m: m[1:]), "packs/weight"),
    "value NaN": (changed("value", put(0, float("nan"))), "packs/value"),
    "value infinite": (changed("value", put(-1, float("-inf"))), "packs/value"),
    "value of integers": (changed("value", lambda v: v.to(torch.int32)), "packs/value"),
    "a pack too few": (changed("value", lambda v: v[1:]), "index int32"),
    "smaller packs": (changed("value", lambda v: v[:, 1:]), "packs of 4 numbers"),
    "packs of nothing": (changed("value", lambda v: v[:, :0]), "packs/value"),
    "no weights": (without("packs", "weight"), "index, weight, value"),
    "no packs": (without("packs"), "record 'packs' is missing"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_packs_are_refused(name: str) -> None:
    change, said = MALFORMED[name]

    def alter(t: int, client: str, content: RecordDict) -> RecordDict:
        return change(content) if (t, client) == (2, "1") else content

    bad, absent = Recorder(small.client_app(net), alter=alter), Recorder(small.client_app(net))
    a = start(strategy(), bad, net), bad
    b = start(strategy(), absent, net, on_round=away({"1": {2}})(absent)), absent
    assert set(a[0].reports[1].failed) == {"1"}
    assert said in a[0].reports[1].failed["1"]
    same_run(a, b, range(1, 4))


def test_clients_state_lies_in_the_state_directory(tmp_path: Path) -> None:
    """Two models a client on disk, nothing of it in this process; the server keeps one number a pack and a client."""
    algorithm = strategy()
    grid = Recorder(small.client_app(net), run_config={"state-dir": str(tmp_path)})
    start(algorithm, grid, net, 3)
    assert all(not context.state for context in grid.contexts.values())
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert [f.name for f in files] == ["accepted.safetensors", "pending.safetensors"] * 5
    padded = 4 * PACK * NUM_PACKS
    for file in files:
        assert 4 * NUM_PARAMS + padded < file.stat().st_size < 4 * NUM_PARAMS + padded + 1000
    state = algorithm.state
    assert state is not None
    assert {f.name for f in dataclasses.fields(state)} == {"params", "generation", "versions", "synced", "initial"}
    assert state.versions["packs"].shape == (NUM_PACKS,)
    assert all(isinstance(t, int) for t in state.synced.values())


# --- further savings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("downlink", ["synced", "mask"])
def test_an_initial_model_from_the_seed_changes_bytes_alone(downlink: str) -> None:
    """Clients 3 and 4 come in round 3 only: of a model that they never saw they are sent what has changed."""
    settings = {"keep_ratio": 0.1, "downlink": downlink}
    runs, grids = [], []
    for initial_model in ("wire", "seed"):
        grid = Recorder(small.client_app(net))
        late = {node: grid.contexts.pop(node) for node, c in [*grid.contexts.items()] if small.client_of(c) > 2}

        def come(report: Any, grid: Recorder = grid, late: dict[int, Any] = late) -> None:
            if report.round == 2:
                grid.contexts.update(late)

        algorithm = strategy(**settings, initial_model=initial_model, min_train_nodes=2)
        runs.append(start(algorithm, grid, net, 4, on_round=come))
        grids.append(grid)
    assert [bits(m) for m in runs[0].models] == [bits(m) for m in runs[1].models]
    assert bits(runs[0].models[0]) != bits(runs[0].models[-1])
    wire, seed = ([r.traffic.train_down_payload for r in run.reports] for run in runs)
    assert seed[0] == 3 * 32  # nothing has changed: the digest alone
    assert wire[0] == 3 * 4 * NUM_PARAMS
    changed = set().union(*(packs_of(s.reply)["index"].tolist() for t in (1, 2) for s in grids[1].of(t)))
    firsts = [trip for trip in grids[1].of(3) if trip.client in ("3", "4")]
    assert len(firsts) == 2
    for trip in firsts:
        assert set(packs_of(trip.sent)["index"].tolist()) == changed
        assert "initial" in packs_of(trip.sent)
    assert wire[2] - seed[2] == 2 * (4 * NUM_PARAMS - 4 * len(changed) * (PACK + 1) - 32)
    assert wire[3] == seed[3]


def test_a_client_whose_initial_model_is_another_is_sent_the_model() -> None:
    """Client 1 builds other weights: it says so in round 1 and trains from round 2 on, from what the server sent."""

    def app(other: bool) -> Recorder:
        def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
            optimizer = session.optimizer(lr=0.1)
            x, y = small.batches(client)[0]
            optimizer.step(lambda: cross_entropy(model(x), y))

        built: list[int] = []

        def build() -> nn.Module:
            built.append(len(built))
            model = net()
            if other and len(built) == 2:  # the second client of the first round
                with torch.no_grad():
                    model[0].bias.add_(1e-7)
            return model

        return Recorder(small.own_loop(build, steps))

    run = start(strategy(initial_model="seed"), grid := app(other=True), net, 3)
    (odd,) = [trip.client for trip in grid.of(1) if trip.reply["client"]["state"] == "lost"]
    assert not run.reports[0].failed
    (second,) = [trip for trip in grid.of(2) if trip.client == odd]
    np.testing.assert_array_equal(vector(second.sent["arrays"]), vector(run.models[1]))
    assert second.reply["client"]["state"] == "ok"
    (third,) = [trip for trip in grid.of(3) if trip.client == odd]
    assert "arrays" not in third.sent
    others = [trip for trip in grid.of(1) if trip.client != odd]
    assert len(others) == 4
    assert all(trip.reply["client"]["state"] == "ok" for trip in others)


def test_another_frozen_part_is_another_initial_model() -> None:
    """The clients' frozen layer differs from the server's: all say so, and get the model in round 2."""
    built: list[int] = []

    def frozen() -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        built.append(1)
        if len(built) > 1:  # the first is the server's
            with torch.no_grad():
                model[0].weight.add_(5.0)
        return model

    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        session.optimizer(lr=0.1).step(
            lambda: cross_entropy(model(small.batches(client)[0][0]), small.batches(client)[0][1])
        )

    algorithm = strategy(initial_model="seed", trainable=["2.weight", "2.bias"], max_failed_rounds=9)
    start(algorithm, grid := Recorder(small.own_loop(frozen, steps)), frozen, 2)
    assert {trip.reply["client"]["state"] for trip in grid.of(1)} == {"lost"}
    assert all("arrays" in trip.sent for trip in grid.of(2))


def test_half_precision_is_kept_to_by_everybody() -> None:
    """A reply in another dtype is refused; a number beyond float16 travels as its largest."""

    def alter(t: int, client: str, content: RecordDict) -> RecordDict:
        change = changed("value", lambda v: v.double())
        return change(content) if (t, client) == (1, "1") else content

    run = start(strategy(pack_dtype="float16"), Recorder(small.client_app(net), alter=alter), net, 1)
    assert "expected float16, but got float64" in run.reports[0].failed["1"]

    def huge(t: int, client: str, content: RecordDict) -> RecordDict:
        return changed("value", lambda v: torch.full_like(v, 6e4))(content) if client == "1" and t < 3 else content

    grid = Recorder(small.client_app(net), alter=huge)
    run = start(strategy(pack_dtype="float16", weights="full", downlink="synced"), grid, net, 4)
    assert np.abs(vector(run.models[2])).max() < 65504 * 2
    assert all(report.aggregated for report in run.reports[:2])
    assert float(view(grid.of(3)[0].sent["packs"]["value"], "value").max()) <= 65504


@pytest.mark.parametrize(("dtype", "digits"), [("bfloat16", 8), ("float16", 11)])
@pytest.mark.parametrize("downlink", ["synced", "mask", "dense"])
def test_half_precision_halves_the_packs_and_rounds_them(downlink: str, dtype: str, digits: int) -> None:
    """Every number that travels is the nearest of ``digits`` binary digits; what the server adds up isn't rounded."""
    settings = {"keep_ratio": 0.2, "downlink": downlink}
    grid = Recorder(small.client_app(net))
    run = start(strategy(**settings, pack_dtype=dtype), grid, net, 3)
    for report in run.reports:
        up = sum(len(view(trip.reply["packs"]["index"], "index")) * (2 * PACK + 8) for trip in grid.of(report.round))
        assert report.traffic.train_up_payload == up > 0
    for trip in grid.of(3):
        told = decode(trip.sent["packs"], "packs") if downlink != "dense" else {}
        assert ("packs" in trip.sent) == bool(told)
        if told:
            true = packed(vector(run.models[2]))[told["index"].long()]
            assert str(told["value"].dtype) == f"torch.{dtype}"
            assert bool(((told["value"].float() - true).abs() <= true.abs() * 2.0**-digits).all())
            assert not torch.equal(told["value"].float(), true)
    state = decode(run.models[-1], "model")
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    exact = start(strategy(**settings), Recorder(small.client_app(net)), net, 1)
    off = np.abs(vector(run.models[1]) - vector(exact.models[1]))
    base = np.abs(vector(exact.models[1]) if downlink == "mask" else vector(exact.models[1]) - vector(exact.models[0]))
    assert 0 < off.max() <= (base.max() * 2.0**-digits + 1e-7)


def test_error_feedback_sends_in_the_end_what_was_left_out() -> None:
    """One client, one pack a round: what it sent and what it still holds is all that its steps moved."""
    movements: list[np.ndarray] = []

    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        def now() -> np.ndarray:
            return torch.cat([p.detach().ravel() for p in model.parameters()]).numpy().copy()

        before, optimizer = now(), session.optimizer(lr=0.1)
        for x, y in small.batches(client):
            optimizer.step(lambda x=x, y=y: cross_entropy(model(x), y))
        movements.append(now() - before)

    settings = {"min_train_nodes": 1, "min_available_nodes": 1, "top_k": 1, "error_feedback": True}
    algorithm = strategy(**settings, pack_dtype="bfloat16")
    run = start(algorithm, grid := Recorder(small.own_loop(net, steps), 1), net, 6)
    sent = np.zeros((NUM_PACKS, PACK))
    for trip in grid.trips:
        parts = decode(trip.reply["packs"], "packs")
        assert len(parts["index"]) == 1
        sent[parts["index"].long().numpy()] += parts["value"].double().numpy()
    (context,) = grid.contexts.values()
    kept = peek(open_store(context, algorithm.experiment_id, "0"), 6)
    assert kept is not None
    total = packed(np.sum(movements, axis=0)).numpy()
    np.testing.assert_allclose(sent + kept["unsent"].numpy(), total, atol=1e-6)
    assert len({int(view(trip.reply["packs"]["index"], "index")[0]) for trip in grid.trips}) > 1
    np.testing.assert_allclose(
        packed(vector(run.result.arrays)).numpy() - packed(vector(run.models[0])).numpy(), sent, atol=1e-6
    )


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_node_sets_its_own_share_and_epochs() -> None:
    configs = [{"partition-id": i, "num-partitions": 5} for i in range(5)]
    configs[1] |= {"keep-ratio": 0.05, "local-epochs": 1}
    configs[2] |= {"top-k": 3}
    grid = Recorder(small.client_app(net, epochs=3), node_configs=configs)
    start(strategy(top_k=7), grid, net, 2)
    for trip in grid.trips:
        sent, steps = len(packs_of(trip.reply)["index"]), trip.reply["metrics"]["num-steps"]
        batches = len(small.batches(int(trip.client)))
        assert steps == batches * (1 if trip.client == "1" else 3)
        # ceil(0.05 * 21) = 2; a turned model has more candidates than that
        assert sent == {"1": 2, "2": 3}.get(trip.client, 7)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"top_k": 3, "keep_ratio": 0.1}, "top_k or keep_ratio"),
        ({"pack_size": 0}, "pack_size"),
        ({"keep_ratio": 0.0}, "keep_ratio"),
        ({"kl_temperature": 0.0}, "kl_temperature"),
        ({"weights": "both"}, "weights"),
        ({"downlink": "sparse"}, "downlink"),
        ({"pack_dtype": "int8"}, "pack_dtype"),
        ({"downlink": "dense", "initial_model": "seed"}, "initial_model must be 'wire'"),
        ({"downlink": "mask", "error_feedback": True}, "error_feedback needs"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        FedCSPACK(**settings)


def test_personal_models_are_evaluated_beside_the_global_one() -> None:
    """Client 4 never trains: its personal model is the global one."""
    algorithm = FedCSPACK(pack_size=PACK, seed=3, keep_ratio=0.1)
    grid = Recorder(small.client_app(net))
    node = next(n for n, c in grid.contexts.items() if small.client_of(c) == 4)

    fourth = grid.contexts[node]
    train = algorithm.configure_train

    def without_the_fourth(*args: Any) -> Any:
        grid.contexts.pop(node, None)
        messages = train(*args)
        grid.contexts[node] = fourth
        return messages

    algorithm.configure_train = without_the_fourth  # type: ignore[method-assign]
    run = start(algorithm, grid, net, 2)
    assert {trip.client for trip in grid.trips} == set(CLIENTS[:4])
    report, accuracies = run.reports[-1], {}
    for context in grid.contexts.values():
        client, model = small.client_of(context), net()
        state = peek(open_store(context, algorithm.experiment_id, str(client)), 2) if client != 4 else None
        if state is None:
            fedstrat.load_arrays(model, run.result.arrays)
        else:
            model.load_state_dict({n.removeprefix("personal/"): t for n, t in state.items() if n != "known"})
        batches = small.batches(client)
        correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
        accuracies[client] = correct / sum(len(y) for _, y in batches)
    assert report.personal.mean == pytest.approx(np.mean(list(accuracies.values())))
    assert report.personal.worst == pytest.approx(min(accuracies.values()))
    metrics = run.result.evaluate_metrics_clientapp[2]
    assert metrics["personal-accuracy-mean"] == report.personal.mean
    assert "personal-num-correct" not in metrics
    assert report.personal.mean != report.fairness.mean
    assert report.elsewhere is None  # these clients have nobody else's data


def test_state_and_rule_are_declared() -> None:
    entry = ALGORITHMS["fedcspack"]
    assert entry.strategy is FedCSPACK
    assert not entry.rule.sends_model
    servers_own = {*FedAvg.hypers, "initial_model"}
    assert {f.name for f in dataclasses.fields(entry.rule)} == set(FedCSPACK.hypers) - servers_own
