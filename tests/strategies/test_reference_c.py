"""FedCSPACK, FedSPU and Ditto against their NumPy twins, global and personal models; see test_reference.py."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp

from fedstrat import CRAFT, Ditto, FedCSPACK, FedSPU
from fedstrat.aggregation.packs import select, to_packs
from fedstrat.flower import client_id
from fedstrat.local.state import open_store, peek
from fedstrat.simulation import InProcessGrid
from tests.reference import craft, ditto, fedcspack, fedspu
from tests.reference.problem import SHAPES, SIZES, Task, make_task
from tests.strategies.problem import one_line, own_loop, run_config
from tests.strategies.test_reference import CLIP, ROUNDS, TOLERANCE, Case, run

# 73 parameters: packs of 4 leave a last one of 1, packs of 73 would be one; 9 rounds up and down meet every branch.
PACKS = {"pack_size": 4}
CASES = [
    *(
        Case(FedCSPACK, fedcspack.FedCSPACK, {**PACKS, "downlink": downlink, "weights": weights})
        for downlink in ("synced", "mask", "dense")
        for weights in ("dual", "cosine", "kl", "full")
    ),
    Case(FedCSPACK, fedcspack.FedCSPACK, {**PACKS, "top_k": 2}, CLIP),
    Case(FedCSPACK, fedcspack.FedCSPACK, {**PACKS, "keep_ratio": 0.1}),
    Case(FedCSPACK, fedcspack.FedCSPACK, {**PACKS, "keep_ratio": 0.1, "downlink": "mask"}),
    Case(FedCSPACK, fedcspack.FedCSPACK, {**PACKS, "top_k": 3, "downlink": "dense"}),
    Case(FedCSPACK, fedcspack.FedCSPACK, {"pack_size": 7, "kl_temperature": 0.05}),
    Case(FedCSPACK, fedcspack.FedCSPACK, {**PACKS, "keep_ratio": 0.1, "error_feedback": True}),
    Case(FedCSPACK, fedcspack.FedCSPACK, {**PACKS, "top_k": 2, "downlink": "dense", "error_feedback": True}, CLIP),
    Case(FedCSPACK, fedcspack.FedCSPACK, {"pack_size": 1}),  # a cosine is 1 or -1
    Case(FedCSPACK, fedcspack.FedCSPACK, {"pack_size": 73}),  # one pack: nothing is ever sent
    Case(FedCSPACK, fedcspack.FedCSPACK, {"pack_size": 100, "weights": "full"}),
    Case(FedSPU, fedspu.FedSPU),
    Case(FedSPU, fedspu.FedSPU, {"ratios": "0.3"}, {**CLIP, "momentum": 0.5}),
    Case(FedSPU, fedspu.FedSPU, {"ratios": "1.0,0.05"}),
    Case(Ditto, ditto.Ditto, {"lam": 0.0}),
    Case(Ditto, ditto.Ditto, {"lam": 0.6}, {**CLIP, "momentum": 0.5}),
]


def personal(grid: InProcessGrid, strategy: Any) -> dict[int, dict[str, np.ndarray]]:
    """Every client's own model as the server has accepted it."""
    models = {}
    for context in grid.contexts.values():
        client = client_id(context)
        state = peek(open_store(context, strategy.experiment_id, client), strategy.accepted.get(client, 0))
        if state is not None:
            own = {n.removeprefix("personal/"): t.numpy() for n, t in state.items() if n.startswith("personal/")}
            models[int(client)] = own | ({"known": state["known"].numpy()} if "known" in state else {})
    return models


def flat(model: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([model[name].ravel() for name in SHAPES])


def check(
    case: Case, strategy: Any, twin: Any, dtype: type[np.floating], app: Callable[[Task], ClientApp], task: Task
) -> None:
    """As check_equals_twin, and the personal models at the end."""
    grid = InProcessGrid(app(task), num_nodes=len(SIZES), run_config=run_config(task))
    models, cohorts = run(strategy, grid, task)
    limit = TOLERANCE[dtype]
    for model, cohort in zip(models[1:], cohorts, strict=True):
        twin.round(cohort)
        x = flat(model)
        assert x.dtype == dtype
        moved = np.linalg.norm(twin.x - task.x0)
        assert np.linalg.norm(x - twin.x) <= limit * moved, f"round {twin.t}"
        np.testing.assert_allclose(model["norm.running_mean"], twin.buffers.mean, rtol=limit, atol=limit)
        assert model["norm.num_batches_tracked"] == twin.buffers.batches
    assert twin.t == ROUNDS >= 5
    own = personal(grid, strategy)
    assert set(own) == {client for cohort in cohorts for client in cohort}
    for client, model in own.items():
        expected = twin.own[client][0] if isinstance(twin, ditto.Ditto) else twin.own[client]
        off = np.linalg.norm(flat(model) - expected) / np.linalg.norm(expected - task.x0)
        assert off <= limit, f"client {client}: off by {off:.2g} of the way"
        if "known" in model:
            known = model["known"].ravel()[: len(expected)]
            np.testing.assert_allclose(known, twin.known[client], rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_strategy_equals_its_twin(case: Case, dtype: type[np.floating]) -> None:
    is_ditto = case.strategy is Ditto
    training = {"epoch_decay": 1.0} if is_ditto else {}  # the personal steps have one learning rate a round
    task = make_task(dtype, **case.task, **training)
    strategy = case.strategy(
        **case.settings, fraction_train=0.5, fraction_evaluate=0.0, seed=11, trainable=list(SHAPES)
    )
    twin = case.twin(make_task(np.float64, **case.task, **training), **case.settings)
    check(case, strategy, twin, dtype, one_line if is_ditto else own_loop, task)


@pytest.mark.parametrize("downlink", ["synced", "mask", "dense"])
def test_one_line_client_equals_the_twin(downlink: str) -> None:
    case = Case(FedCSPACK, fedcspack.FedCSPACK, {**PACKS, "downlink": downlink, "keep_ratio": 0.2}, CLIP)
    task = make_task(**CLIP, epoch_decay=1.0)
    strategy = FedCSPACK(**case.settings, fraction_train=0.5, fraction_evaluate=0.0, seed=11, trainable=list(SHAPES))
    check(case, strategy, fedcspack.FedCSPACK(task, **case.settings), np.float64, one_line, task)


def test_ditto_over_craft_equals_the_twin() -> None:
    task = make_task(epoch_decay=1.0)
    strategy = Ditto(
        lam=0.6,
        aggregator=CRAFT(server_lr=0.3),
        fraction_train=0.5,
        fraction_evaluate=0.0,
        seed=11,
        trainable=list(SHAPES),
    )
    twin = ditto.Ditto(task, lam=0.6, aggregator=lambda t: craft.CRAFT(t, server_lr=0.3))
    check(Case(Ditto, ditto.Ditto), strategy, twin, np.float64, one_line, task)


def test_the_problem_meets_the_branches() -> None:
    """Packs stay unsent, clients miss rounds, and what a client knows differs from x under mask alone."""
    cohorts = [[0, 1, 2, 3], [4, 5], [0, 6], [4, 7], [1, 5], [0, 2]]
    stale = {}
    for downlink in ("synced", "mask"):
        twin = fedcspack.FedCSPACK(make_task(), pack_size=4, keep_ratio=0.1, downlink=downlink)
        told = []
        for cohort in cohorts[:-1]:
            twin.round(cohort)
        twin.t += 1
        for client in cohorts[-1]:
            told.append(twin.told(client).mean())
            twin.local(client)
        stale[downlink] = max(np.abs(twin.known[c] - twin.x).max() for c in cohorts[-1])
        assert all(0 < share < 1 for share in told)
    assert stale["synced"] == 0
    assert stale["mask"] > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_the_threshold_is_exact_where_float32_sums_go_wrong(seed: int) -> None:
    """Two million weights that turned very little: float32 picks other packs, the strategy those of float64."""
    rng = np.random.default_rng(seed)
    x = (0.05 * rng.normal(size=2_000_000)).astype(np.float32)
    w = (x + 1e-4 * rng.normal(size=x.shape)).astype(np.float32)
    packs = [to_packs({"w": torch.from_numpy(v)}, 1024) for v in (w, x)]
    chosen = select(*packs, weights="cosine").index.numpy()

    wide = [fedcspack.packed(v.astype(np.float64), 1024) for v in (w, x)]
    a, b = wide
    theta = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    expected = np.flatnonzero(theta < (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))
    np.testing.assert_array_equal(chosen, expected)

    narrow = torch.nn.functional.cosine_similarity(*packs) < torch.nn.functional.cosine_similarity(
        *(p.reshape(1, -1) for p in packs)
    )
    wrong = set(torch.nonzero(narrow).flatten().tolist()) ^ set(expected.tolist())
    assert len(wrong) > 0.01 * len(theta)
