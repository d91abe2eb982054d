"""CRAFT's closed form against its identities and against NumPy's pseudo-inverse, and the strategy around it."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from fedstrat import CRAFT, ConFIG, LocalSession
from fedstrat.aggregation.conflict import Solution, craft_direction, products, solve
from fedstrat.aggregation.groups import group_direction
from fedstrat.errors import ConfigError
from fedstrat.models import layer_groups
from fedstrat.payloads import decode
from tests.strategies import small
from tests.strategies.small import SIZES, Recorder

EXACT = {"rtol": 1e-10, "max_norm": 1e9}
COMMON = {"seed": 3, "fraction_evaluate": 0.0}


def draw(m: int, d: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Random deltas (m, d) of very different lengths, and weights."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.logspace(-2, 2, m)[:, None]
    deltas = torch.randn(m, d, generator=generator, dtype=torch.float32).mul_(lengths)
    return deltas.to(dtype), torch.rand(m, generator=generator, dtype=torch.float64) + 0.05


def rho_of(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum()


def unit_rows(deltas: torch.Tensor) -> torch.Tensor:
    return deltas / deltas.norm(dim=1, keepdim=True)


def solution(deltas: torch.Tensor, weights: Any, reference: torch.Tensor | None = None, **guards: Any) -> Solution:
    return solve(products([(deltas, reference)], len(deltas)), weights, **guards)


# --- the direction of many clients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 1_000, 36_928, 262_144, 2_400_000])
def test_every_client_gets_its_share(width: int) -> None:
    # 20 clients as the server has them: float32, with a reference.
    deltas, weights = draw(20, width, seed=width, dtype=torch.float32)
    reference = deltas.sum(dim=0)
    rho = rho_of(weights)
    for previous in (None, reference):
        g = craft_direction(deltas, weights, previous)
        assert g.dtype == torch.float32
        shares = torch.stack([(row.double() @ g.double()) / row.double().norm() for row in deltas])
        assert ((shares - rho).abs() / rho).max() <= 1e-3
        assert g.norm() <= 10.0


@pytest.mark.parametrize("width", [1, 3, 8, 19, 20, 25, 39])
def test_rank_and_smallest_share_are_reported_when_the_layer_is_narrow(width: int) -> None:
    deltas, weights = draw(20, width, seed=width)
    reference = deltas[0] + deltas[1]
    found = solution(deltas, weights, reference)
    g = craft_direction(deltas, weights, reference)
    shares = unit_rows(deltas) @ g
    assert found.rank <= min(width, 20)
    assert found.norm == pytest.approx(g.norm().item(), rel=1e-9)
    assert found.norm <= 10.0
    assert found.min_inner == pytest.approx(shares.min().item(), abs=1e-9)
    torch.testing.assert_close(found.inner, shares, atol=1e-9, rtol=0)
    if found.rank == 20 and not found.cut:
        torch.testing.assert_close(shares, rho_of(weights), atol=1e-9, rtol=0)
    if width < 20:
        assert (shares - rho_of(weights)).abs().max() > 1e-3, "a narrow layer can't give every client its share"


def test_opposite_clients_have_a_negative_share() -> None:
    # U g = (1 - (-1)) / 2 * (.7 - .3) along u: (.2, -.2).
    row = torch.tensor([3.0, 4.0], dtype=torch.float64)
    found = solution(torch.stack([row, -2 * row]), [0.7, 0.3])
    torch.testing.assert_close(found.inner, torch.tensor([0.2, -0.2], dtype=torch.float64))
    assert (found.rank, found.min_inner) == (1, pytest.approx(-0.2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reference", [None, [1.0, 0.0, -2.0], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize(
    "rows",
    [
        [[1.0, 2.0, 2.0]] * 3,
        [[1.0, 2.0, 2.0], [-1.0, -2.0, -2.0]],
        [[1.0, 2.0, 2.0], [1.0, 2.0, 2.0000002]],
        [[0.0, 0.0, 0.0]] * 2,
        [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]],
        [[1e-30, 0.0, 0.0], [1.0, 0.0, 0.0]],
        [[1e30, 0.0, 0.0], [0.0, 1.0, 0.0]],
        [[0.0, 3.0, 4.0]],
    ],
    ids=["identical", "opposite", "almost identical", "all zero", "one zero", "tiny", "huge", "single"],
)
def test_awkward_updates_give_a_finite_bounded_direction(rows: Any, reference: Any, dtype: torch.dtype) -> None:
    previous = None if reference is None else torch.tensor(reference, dtype=dtype)
    g = craft_direction(torch.tensor(rows, dtype=dtype), [1.0 + i for i in range(len(rows))], previous)
    assert g.dtype == dtype
    assert torch.isfinite(g).all()
    assert g.norm() <= 10.0 * (1 + 1e-6)


def test_identical_clients_share_equally() -> None:
    # U has rank 1: g = u times the mean of rho, whatever rho is; with r = u: g = r + u (1/2 - 1).
    row = torch.tensor([0.0, 3.0, 4.0], dtype=torch.float64)
    u = row / 5
    for previous in (None, 7.0 * row):
        g = craft_direction(torch.stack([row, 3 * row]), [0.9, 0.1], previous)
        torch.testing.assert_close(g, 0.5 * u)


# --- max_norm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cosine", "uncut"), [(0.999, 9.0), (0.9999, 28.0), (0.99999, 89.0)])
def test_near_duplicates_do_not_blow_the_direction_up(cosine: float, uncut: float) -> None:
    deltas = torch.tensor([[1.0, 0.0], [cosine, (1 - cosine**2) ** 0.5]], dtype=torch.float64)
    free = craft_direction(deltas, [0.7, 0.3], max_norm=1e6)
    # |g|^2 = rho' A^-1 rho with A = [[1, c], [c, 1]]
    assert free.norm().item() == pytest.approx(((0.58 - 0.42 * cosine) / (1 - cosine**2)) ** 0.5, rel=1e-6)
    assert free.norm().item() == pytest.approx(uncut, rel=0.02)

    found = solution(deltas, [0.7, 0.3])
    bounded = craft_direction(deltas, [0.7, 0.3])
    assert bounded.norm() <= 10.0
    if uncut < 10.0:
        assert found.cut == ()
        torch.testing.assert_close(bounded, free)
    else:
        # What is left is the direction that they share: the mean of u_1 and u_2, with <u_i, g> = 1/2 for both.
        assert (found.rank, found.cut) == (1, (0, 1))
        torch.testing.assert_close(deltas @ bounded, torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_the_bound_names_only_the_near_duplicates() -> None:
    u = unit_rows(draw(5, 200, seed=0)[0])
    u[3] = u[1] + 1e-3 * u[3]
    found = solution(u, [0.4, 0.1, 0.1, 0.3, 0.1], u[2], rtol=1e-9)
    assert found.cut == (1, 3)
    assert found.rank == 4
    assert found.norm <= 10.0


@given(seed=st.integers(0, 2**31), m=st.integers(1, 8), d=st.integers(1, 12), bound=st.floats(1.0, 50.0))
@settings(max_examples=60, deadline=None)
def test_the_direction_is_never_longer_than_max_norm(seed: int, m: int, d: int, bound: float) -> None:
    deltas, weights = draw(m, d, seed)
    deltas[-1] = deltas[0] + 1e-5 * deltas[-1]
    for reference in (None, deltas[0]):
        g = craft_direction(deltas, weights, reference, max_norm=bound, rtol=1e-9)
        assert g.norm() <= bound * (1 + 1e-9)


# --- the closed form -------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**31),
    m=st.integers(1, 7),
    d=st.integers(1, 14),
    duplicate=st.booleans(),
    with_reference=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_it_is_the_pseudo_inverse(seed: int, m: int, d: int, duplicate: bool, with_reference: bool) -> None:
    deltas, weights = draw(m, d, seed)
    if duplicate:
        deltas[-1] = 3.0 * deltas[0]
    reference = torch.randn(d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rho, u = rho_of(weights).numpy(), unit_rows(deltas).numpy()
    singular = np.linalg.svd(u, compute_uv=False)
    assume(not any(1e-7 < s / singular[0] < 1e-3 for s in singular))  # no doubt about the rank
    r = (reference / reference.norm()).numpy() if with_reference else np.zeros(d)
    expected = r + np.linalg.pinv(u, rcond=1e-5) @ (rho - u @ r)
    g = craft_direction(deltas, weights, reference if with_reference else None, rtol=1e-5, max_norm=1e9).numpy()
    np.testing.assert_allclose(g, expected, atol=1e-7)


@given(seed=st.integers(0, 2**31), m=st.integers(1, 7), extra=st.integers(2, 30))
@settings(max_examples=60, deadline=None)
def test_identities_of_full_row_rank(seed: int, m: int, extra: int) -> None:
    deltas, weights = draw(m, m + extra, seed)
    reference = deltas.flip(0).cumsum(0)[0] + torch.linspace(-1, 1, m + extra, dtype=torch.float64)
    u, rho, r = unit_rows(deltas), rho_of(weights), reference / reference.norm()
    assume(torch.linalg.svdvals(u)[-1] > 0.05)
    g = craft_direction(deltas, weights, reference, **EXACT)
    close = {"atol": 1e-9, "rtol": 0.0}
    torch.testing.assert_close(u @ g, rho, **close)
    assert bool((deltas @ g > 0).all())
    inside = torch.linalg.pinv(u) @ u  # the projection on the clients' span
    torch.testing.assert_close(inside @ (g - r), g - r, **close)
    squares = ((r - inside @ r).square().sum() + (torch.linalg.pinv(u) @ rho).square().sum()).item()
    assert g.square().sum().item() == pytest.approx(squares, abs=1e-9)
    # Lengths of updates and order of clients don't matter; a rotation of the space rotates the result.
    torch.testing.assert_close(craft_direction(deltas * weights[:, None], weights, 9 * reference, **EXACT), g, **close)
    torch.testing.assert_close(craft_direction(deltas.flip(0), weights.flip(0), reference, **EXACT), g, **close)
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(m + extra, m + extra, dtype=torch.float64, generator=generator))[0]
    rotated = craft_direction(deltas @ rotation, weights, reference @ rotation, **EXACT)
    torch.testing.assert_close(rotated, g @ rotation, **close)


def test_a_feasible_reference_stays() -> None:
    # Orthogonal clients with equal shares 1/2; r of length 1 has <u_i, r> = 1/2 and a third entry for the rest.
    deltas = torch.tensor([[2.0, 0.0, 0.0], [0.0, 5.0, 0.0]], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.5, 0.5**0.5], dtype=torch.float64)
    torch.testing.assert_close(craft_direction(deltas, [1.0, 1.0], 4 * reference), reference, atol=1e-12, rtol=0)


def test_orthonormal_updates_give_their_weighted_sum() -> None:
    rows = torch.linalg.qr(torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0].T
    rho = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    for scale in (1.0, 30.0):
        torch.testing.assert_close(craft_direction(scale * rows, rho), rho @ rows, atol=1e-12, rtol=0)


# --- one active client, or none --------------------------------------------------------------------------------------


def test_a_single_client() -> None:
    delta = torch.tensor([[3.0, 0.0, 4.0]], dtype=torch.float64)
    u, previous = delta[0] / 5, torch.tensor([0.0, 2.0, 2.0], dtype=torch.float64)
    r = previous / previous.norm()
    close = {"atol": 1e-12, "rtol": 0.0}
    torch.testing.assert_close(craft_direction(delta, [8.0]), u, **close)
    torch.testing.assert_close(craft_direction(delta, [8.0], previous), r + u * (1 - u @ r), **close)
    raw = craft_direction(delta, [8.0], previous, single_client="raw")
    torch.testing.assert_close(raw, delta[0], **close)
    # It is the number of active clients that counts; weights are renormalised over them.
    idle = torch.cat([torch.full_like(delta, 1e-9), delta])
    torch.testing.assert_close(craft_direction(idle, [8.0, 2.0], previous), r + u * (1 - u @ r), **close)
    torch.testing.assert_close(craft_direction(idle, [8.0, 2.0], single_client="raw"), delta[0], **close)


def test_nobody_active_gives_the_weighted_mean() -> None:
    deltas = torch.tensor([[4e-7, 0.0], [0.0, 8e-7]], dtype=torch.float64)
    g = craft_direction(deltas, [3.0, 1.0], torch.tensor([1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(g, torch.tensor([3e-7, 2e-7], dtype=torch.float64), atol=1e-20, rtol=1e-12)
    assert not craft_direction(torch.zeros(2, 2), [3.0, 1.0], torch.ones(2)).any()
    active = craft_direction(deltas, [3.0, 1.0], min_norm=1e-8)
    torch.testing.assert_close(active, torch.tensor([0.75, 0.25], dtype=torch.float64))


@pytest.mark.parametrize("weights", [[1.0, -0.1], [1.0, float("nan")], [1.0, float("inf")], [1.0], [1.0, 1.0, 1.0]])
def test_weights_that_make_no_sense_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="expected 2 finite weights"):
        craft_direction(torch.eye(2), weights)


def test_zero_weights_count_equally() -> None:
    torch.testing.assert_close(craft_direction(torch.eye(2), [0.0, 0.0]), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize(
    ("deltas", "reference", "said"),
    [
        (torch.ones(3), None, r"\(m, d\).*\[3\]"),
        (torch.ones(0, 3), None, r"m >= 1.*\[0, 3\]"),
        (torch.ones(2, 3), torch.ones(4), r"\[3\].*\[4\]"),
    ],
)
def test_shapes_that_do_not_match_are_named(deltas: torch.Tensor, reference: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        craft_direction(deltas, [1.0] * len(deltas), reference)


def test_inputs_are_not_mutated() -> None:
    deltas, weights = draw(4, 10, seed=1)
    reference = deltas.sum(0)
    before = small.frozen([deltas, weights, reference])
    craft_direction(deltas, weights, reference)
    assert small.frozen([deltas, weights, reference]) == before


# --- the strategy ----------------------------------------------------------------------------------------------------


def in_one_layer(_: str) -> str:
    return "all"


def by_layer(name: str) -> str:
    return name.rpartition(".")[0] or name


GROUPINGS: dict[str, tuple[Any, Callable[[str], str]]] = {
    "layer": ("layer", by_layer),
    "tensor": ("tensor", lambda name: name),
    "model": ("model", in_one_layer),
    "mapping": ({n: n[0] for n in small.TRAINED}, lambda name: name[0]),
}


@pytest.mark.parametrize("algorithm", [CRAFT, ConFIG])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_groups_have_a_direction_each(algorithm: Any, grouping: str) -> None:
    given_as, group_of = GROUPINGS[grouping]
    own = {"length": "raw"} if algorithm is ConFIG else {}
    strategy = algorithm(**COMMON, trainable=small.TRAINED, grouping=given_as, server_lr=0.5, **own)
    grid = Recorder(small.client_app(small.everything))
    run = small.start(strategy, grid, small.everything, 2)
    groups: dict[str, list[str]] = {}
    for name in small.TRAINED:
        groups.setdefault(group_of(name), []).append(name)
    assert len(groups) == {"layer": 6, "tensor": 9, "model": 1, "mapping": 6}[grouping]
    previous: dict[str, torch.Tensor | None] = dict.fromkeys(groups)
    for t in (1, 2):
        x = decode(run.models[t - 1], "test")
        ys = [decode(trip.reply["arrays"], "test") for trip in grid.of(t)]
        for group, names in groups.items():
            here = torch.cat([x[n].double().ravel() for n in names])
            deltas = torch.stack([torch.cat([y[n].double().ravel() for n in names]) - here for y in ys])
            g = craft_direction(deltas, list(SIZES), previous[group] if algorithm is CRAFT else None)
            after = torch.cat([decode(run.models[t], "test")[n].double().ravel() for n in names])
            torch.testing.assert_close(after, here + 0.5 * g, atol=1e-5, rtol=0)
            previous[group] = g


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3)
        self.norm = nn.GroupNorm(1, 2)
        self.output = nn.Linear(8, small.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.norm(self.conv(x[:, None]))).flatten(1))


def test_layer_groups_of_a_model_is_a_grouping() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = Convolution()
    groups = layer_groups(start)
    assert groups["norm.weight"] == groups["conv.weight"] == groups["conv.bias"] != groups["output.bias"]

    def model() -> nn.Module:
        own = Convolution()
        own.load_state_dict(start.state_dict())
        return own

    by_model = small.run(CRAFT(**COMMON, grouping=groups), model, 1)
    assert by_model.reports[0].diagnostics["active-groups"] == 2
    by_shapes = small.run(CRAFT(**COMMON, grouping="merged"), model, 1)
    assert small.bits(by_shapes.result.arrays) == small.bits(by_model.result.arrays)
    assert small.run(CRAFT(**COMMON), model, 1).reports[0].diagnostics["active-groups"] == 3


@pytest.mark.parametrize("length", [1.0, 3e17, 1e25])
def test_products_that_overflow_float32_are_made_in_float64(length: float) -> None:
    """One of five updates is enormous; all unit updates still get <u_i, g> = 1/5."""
    generator = torch.Generator().manual_seed(0)
    x = {"w": torch.randn(100_000, generator=generator)}
    ys = [{"w": x["w"] + 0.01 * torch.randn(100_000, generator=generator)} for _ in range(4)]
    ys.append({"w": length * torch.randn(100_000, generator=generator)})
    solution, g = group_direction(x, ys, ["w"], None, functools.partial(solve, weights=[1.0] * 5))
    assert solution.rank == 5
    for y in ys:
        d = y["w"].double() - x["w"].double()
        assert float(d @ g["w"] / d.norm()) == pytest.approx(0.2, rel=1e-4)


@pytest.mark.parametrize("algorithm", [CRAFT, ConFIG])
def test_a_mapping_without_every_parameter_is_refused_before_the_first_round(algorithm: Any) -> None:
    strategy = algorithm(**COMMON, grouping={"weight": "all"})
    grid = Recorder(small.client_app(small.convex))
    with pytest.raises(ConfigError, match="'bias'"):
        small.start(strategy, grid, small.convex, 1)
    assert grid.trips == []


def test_rounds_report_rank_and_smallest_share() -> None:
    grid = Recorder(small.client_app(small.double, lambda client: small.batches(client, 8, torch.float64)))
    run = small.start(CRAFT(**COMMON, grouping="tensor"), grid, small.double, 1)
    x = decode(run.models[0], "test")
    shares, ranks, norms = [], [], []
    for name in x:
        ys = [decode(trip.reply["arrays"], "test")[name] for trip in grid.of(1)]
        deltas = torch.stack([(y - x[name]).ravel() for y in ys])
        g = craft_direction(deltas, list(SIZES))
        shares.append((unit_rows(deltas) @ g).min().item())
        ranks.append(int(torch.linalg.matrix_rank(unit_rows(deltas), rtol=1e-3)))
        norms.append(g.norm().item())
    assert min(ranks) < 5 == max(ranks)  # three biases can't satisfy five clients
    found = run.reports[0].diagnostics
    assert found["min-rank-share"] == min(ranks) / 5
    assert found["min-inner"] == pytest.approx(min(shares), abs=1e-9)
    assert found["max-direction-norm"] == pytest.approx(max(norms))
    assert found["active-groups"] == 2
    assert found["capped-groups"] == 0


def test_a_group_in_which_nobody_moved_keeps_its_reference() -> None:
    # In round 2 every client stands still, so round 3's references are those of round 1.
    def clients(resting: int) -> Any:
        return small.client_app(
            small.double, lambda c: small.batches(c, 8, torch.float64), epochs=lambda t: t != resting
        )

    rests, straight = (Recorder(clients(resting)) for resting in (2, 0))
    late = small.start(CRAFT(**COMMON), rests, small.double, 3)
    assert small.bits(late.models[2]) == small.bits(late.models[1])
    assert late.reports[1].diagnostics["active-groups"] == 0
    on_time = small.start(CRAFT(**COMMON), straight, small.double, 2)
    assert small.bits(late.models[3]) == small.bits(on_time.models[2])


def test_a_capped_group_is_logged_with_its_near_duplicate_clients(caplog: pytest.LogCaptureFixture) -> None:
    # Clients 1 and 3 walk almost the same way, the others their own; each takes one step of length lr |slope|.
    slopes = torch.eye(21, dtype=torch.float64)[:5]
    slopes[3] = slopes[1] + 3e-3 * slopes[3]

    def walk(session: LocalSession, model: nn.Module, client: int) -> None:
        optimizer = session.optimizer(lr=0.1)
        optimizer.step(lambda: slopes[client] @ nn.utils.parameters_to_vector(model.parameters()))

    strategy = CRAFT(**COMMON, grouping="model")
    with caplog.at_level("WARNING", logger="flwr"):
        run = small.start(strategy, Recorder(small.own_loop(small.double, walk)), small.double, 1)
    assert run.reports[0].diagnostics["capped-groups"] == 1
    assert run.reports[0].diagnostics["min-rank-share"] == 4 / 5
    assert "near-duplicate clients: 1, 3" in caplog.text


@pytest.mark.parametrize(("noise", "tolerance"), [(1.0, 2e-6), (1e-3, 1e-7)])
def test_large_groups_are_solved_in_float32_and_near_duplicates_again_in_float64(noise, tolerance):
    generator = torch.Generator().manual_seed(0)
    x = {"w": torch.randn(40_000, generator=generator), "b": torch.randn(7, generator=generator)}

    def shifted() -> dict[str, torch.Tensor]:
        return {n: p + 0.01 * (p.flip(0) + noise * torch.randn(p.shape, generator=generator)) for n, p in x.items()}

    clients, previous = [shifted() for _ in range(8)], shifted()
    weights = torch.linspace(1.0, 2.0, 8, dtype=torch.float64)
    guards = {"min_norm": 0.0, "rtol": 1e-5, "max_norm": 1e6, "single_client": "formula"}
    closed_form = functools.partial(solve, weights=weights, **guards)
    solution, direction = group_direction(x, clients, ("w", "b"), previous, closed_form)
    deltas = torch.stack([torch.cat([y[n].double() - x[n].double() for n in x]) for y in clients])
    U, r = deltas / deltas.norm(dim=1, keepdim=True), torch.cat([previous[n].double() for n in x])
    r = r / r.norm()
    expected = r + torch.linalg.pinv(U) @ (weights / weights.sum() - U @ r)
    found = torch.cat([direction["w"], direction["b"]])
    assert float((found - expected).norm() / expected.norm()) < tolerance
    assert solution.rank == 8
    assert np.isfinite(solution.sensitivity)
