"""``update_dtype``: clients send y_i - x in 16 bits, and the server steps over the models that these restore."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

import fedstrat
from fedstrat import deltas
from fedstrat.errors import ConfigError, PayloadError, RunFailedError, StateError
from fedstrat.local.state import open_store
from fedstrat.payloads import Broadcast, decode, numpy_array, raw_array
from fedstrat.runs import config
from fedstrat.runs.checkpoint import CheckpointFolder
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS
from tests.reference import craft, fedacg, fedavg, fedsmoo, fedvssam, scaffold
from tests.reference.problem import Array, Task, make_task
from tests.reference.rounds import Trained, Twin
from tests.strategies import small
from tests.strategies.problem import own_loop
from tests.strategies.small import CLIENTS, Recorder, bits, replaced, with_array
from tests.strategies.test_reference import Case, check_equals_twin

WHOLE = sorted(name for name, entry in ALGORITHMS.items() if entry.strategy.sends_model)
PARTS = sorted(set(ALGORITHMS) - set(WHOLE))


def make(algorithm: str, **settings: Any) -> Any:
    own = {"seed": 7, "fraction_evaluate": 0.0, "update_dtype": "bfloat16", **settings}
    return ALGORITHMS[algorithm].strategy(**own)


# --- against the twins of the reference, whose clients round by hand -------------------------------------------------


def rounded(d: Array, dtype: str) -> Array:
    """The nearest number of 8 (bfloat16) or 11 (float16) significant bits; what is tiny in float16 has fewer."""
    if dtype == "float16":
        return d.astype(np.float16).astype(np.float64)
    mantissa, exponent = np.frexp(d)
    return np.ldexp(np.rint(mantissa * 2**8) / 2**8, exponent)


def rounds(twin: type[Twin]) -> type[Twin]:
    """The twin whose server sees rounded displacements."""

    class Rounding(twin):  # type: ignore[misc, valid-type]
        def __init__(self, task: Task, update_dtype: str, **settings: Any) -> None:
            super().__init__(task, **settings)
            self.dtype, self.exact = update_dtype, dict[int, Trained]()

        def local(self, client: int) -> Trained:
            self.exact[client] = exact = super().local(client)
            x = getattr(self, "z", self.x)  # FedACG's clients are sent z
            seen = x + rounded(exact.y - x, self.dtype)
            if twin is fedsmoo.FedSMOO:  # h_i sums up what the server saw, so that its mean is the server's h
                self.memories[client] = self.memories[client] + (seen - exact.y)
            return dataclasses.replace(exact, y=seen)

        def move(self, trained: dict[int, Trained]) -> None:
            if twin is not scaffold.SCAFFOLD:
                super().move(trained)
                return
            x = self.x
            super().move({i: self.exact[i] for i in trained})  # c_i and c know the steps as they were
            present = sum(map(self.mass, trained))
            self.x = x + self.server_lr * sum(self.mass(i) / present * (r.y - x) for i, r in trained.items())

    return Rounding


CASES = [
    Case(fedstrat.FedAvg, fedavg.FedAvg, {"server_lr": 0.7}),
    Case(fedstrat.SCAFFOLD, scaffold.SCAFFOLD, {"weighting": "examples", "server_lr": 0.8}),
    Case(fedstrat.SCAFFOLD, scaffold.SCAFFOLD),
    Case(fedstrat.CRAFT, craft.CRAFT),
    Case(fedstrat.FedVSSAM, fedvssam.FedVSSAM, {"rho": 0.3}),
    Case(fedstrat.FedSMOO, fedsmoo.FedSMOO, {"lamb": 0.4}),
    Case(fedstrat.FedACG, fedacg.FedACG, {"beta": 0.5}),  # clients move from z, not from the model that is evaluated
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_step_is_that_of_displacements_rounded_by_hand(case: Case, dtype: str) -> None:
    settings = {**case.settings, "update_dtype": dtype}
    check_equals_twin(dataclasses.replace(case, twin=rounds(case.twin), settings=settings), np.float64, own_loop)

    exact, coarse = case.twin(make_task(), **case.settings), rounds(case.twin)(make_task(), **settings)
    for cohort in ([0, 3, 4, 7], [1, 2, 3, 6]):
        exact.round(cohort)
        coarse.round(cohort)
    moved = np.linalg.norm(exact.x - exact.task.x0)
    assert 1e-5 < np.linalg.norm(exact.x - coarse.x) / moved < {"bfloat16": 2**-7, "float16": 2**-10}[dtype]


# --- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_displacements_travel_in_place_of_the_model(name: str, dtype: str) -> None:
    grid = Recorder(small.client_app(small.everything))
    run = small.start(make(name, update_dtype=dtype, trainable=small.TRAINED), grid, small.everything, 2)
    plain = Recorder(small.client_app(small.everything))
    small.start(make(name, update_dtype="model", trainable=small.TRAINED), plain, small.everything, 2)
    assert run.reports[1].trained == CLIENTS
    for trip, before in zip(grid.trips, plain.trips, strict=True):
        assert trip.sent["config"]["fedstrat.update-dtype"] == dtype
        assert "fedstrat.update-dtype" not in before.sent["config"]
        assert set(trip.reply) == (set(before.reply) - {"arrays"}) | {"delta", "buffers"}
        sent = trip.reply["delta"]
        assert tuple(sent) == small.TRAINED
        assert {(array.stype, array.dtype) for array in sent.values()} == {("fedstrat.raw", dtype)}
        assert set(trip.reply["buffers"]) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    # In the first round all is as it is without, but for the rounding.
    for trip, before in zip(grid.of(1), plain.of(1), strict=True):
        x, y = decode(trip.sent["arrays"], "x"), decode(before.reply["arrays"], "y")
        for n, d in decode(trip.reply["delta"], "delta").items():
            error = {"bfloat16": 2**-8, "float16": 2**-11}[dtype] * (y[n] - x[n]).abs() + 2**-25
            assert bool(((d.float() - (y[n] - x[n])).abs() <= error).all())
        for n, b in decode(trip.reply["buffers"], "buffers").items():
            assert torch.equal(b, y[n])


def test_bytes_up_are_half_of_the_parameters_and_the_buffers_that_changed() -> None:
    numbers = {"model": 4, "bfloat16": 2, "float16": 2}
    for dtype, size in numbers.items():
        run = small.run(make("fedavg", update_dtype=dtype), small.convex, 1)
        assert run.reports[0].traffic.train_up_payload == len(CLIENTS) * size * small.CLASSES * (small.FEATURES + 1)
        assert run.reports[0].traffic.train_down_payload == len(CLIENTS) * 4 * small.CLASSES * (small.FEATURES + 1)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "craft"])
def test_equal_runs_give_equal_bits_in_whatever_order_replies_come(name: str) -> None:
    runs = [
        small.start(
            make(name, fraction_train=0.6, trainable=small.TRAINED),
            Recorder(small.client_app(small.everything), arrange=arrange),
            small.everything,
        )
        for arrange in (list, list, lambda replies: replies[::-1])
    ]
    assert bits(runs[0].result.arrays) == bits(runs[1].result.arrays) == bits(runs[2].result.arrays)
    assert bits(runs[0].result.arrays) != bits(runs[0].models[0])


def test_a_resumed_run_goes_on_to_the_bit_and_with_the_same_dtype(tmp_path: Path) -> None:
    def ours(**settings: Any) -> Any:
        return make("scaffold", fraction_train=0.6, trainable=small.TRAINED, **settings)

    whole = small.start(ours(), Recorder(small.client_app(small.everything)), small.everything, 4)
    grid, checkpoints = Recorder(small.client_app(small.everything)), CheckpointFolder(tmp_path, every=1)
    small.start(ours(), grid, small.everything, 2, checkpoints=checkpoints)
    with pytest.raises(StateError, match="made with update_dtype = 'bfloat16', but this strategy has 'float16'"):
        small.start(ours(update_dtype="float16"), grid, small.everything, 4, resume=checkpoints.latest())
    rest = small.start(ours(), grid, small.everything, 4, resume=checkpoints.latest())
    assert bits(rest.result.arrays) == bits(whole.result.arrays)


def test_clients_that_know_nothing_of_it_send_whole_models() -> None:
    """Flower's own clients, and a cohort where one of ours is among them."""

    def foreign(ours: set[int]) -> ClientApp:
        app, inner = ClientApp(), small.client_app(small.convex)

        @app.train()
        def train(msg: Message, context: Context) -> Message:
            reply = inner(msg, context)
            if small.client_of(context) not in ours:
                model = small.convex()
                for name, d in decode(reply.content["delta"], "delta").items():
                    model.state_dict()[name].copy_(decode(msg.content["arrays"], "x")[name] + d)
                reply.content = RecordDict({"mine": fedstrat.to_arrays(model), "metrics": reply.content["metrics"]})
            return reply

        @app.query()
        def query(msg: Message, context: Context) -> Message:
            return inner(msg, context)

        return app

    all_ours = small.run(make("fedavg"), small.convex)
    for ours in (set(), {2}):
        run = small.start(make("fedavg"), Recorder(foreign(ours)), small.convex)
        assert run.reports[0].trained == CLIENTS
        assert bits(run.result.arrays) == bits(all_ours.result.arrays)


def test_who_is_sent_another_model_than_x_replies_with_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Apart(fedstrat.FedAvg):
        def broadcast(self, state: Any, client: str) -> Broadcast[Any]:
            if client != "3":
                return super().broadcast(state, client)
            return dataclasses.replace(
                super().broadcast(state, client), params={n: p + 1 for n, p in state.params.items()}
            )

    monkeypatch.setitem(ALGORITHMS, "apart", ALGORITHMS["fedavg"]._replace(strategy=Apart))
    grid = Recorder(small.client_app(small.convex))
    run = small.start(make("apart"), grid, small.convex, 1)
    assert run.reports[0].trained == CLIENTS
    assert {trip.client for trip in grid.trips if "arrays" in trip.reply} == {"3"}


# --- what clients keep -----------------------------------------------------------------------------------------------


def kept(strategy: Any, grid: InProcessGrid) -> dict[str, dict[str, torch.Tensor]]:
    """Client -> what it remembers of the last round."""
    return {
        str(i): open_store(context, strategy.experiment_id, str(i)).read("pending")
        for i, context in enumerate(grid.contexts.values())
    }


@pytest.mark.parametrize(("name", "settings"), [("fedavg", {"evaluate_personal": True}), ("ditto", {}), ("moon", {})])
def test_personal_models_are_those_that_were_trained(name: str, settings: dict[str, Any]) -> None:
    """The rounding is the wire's alone: after the first round, in which both train from x_0, not a bit differs."""
    states = []
    for dtype in ("model", "bfloat16"):
        strategy, grid = make(name, update_dtype=dtype, **settings), Recorder(small.client_app(small.convex))
        small.start(strategy, grid, small.convex, 1)
        states.append(small.frozen(kept(strategy, grid)))
    assert states[0] == states[1]
    assert any(n.startswith("personal/") for n in states[0]["0"])


def test_control_variates_know_the_steps_as_they_were_and_c_is_their_mean() -> None:
    """c_i+ = (x - y_i) / (K eta) with y_i as trained, which travels in full."""
    strategy, grid = (
        make("scaffold"),
        Recorder(small.client_app(small.double, lambda i: small.batches(i, dtype=torch.float64))),
    )
    small.start(strategy, grid, small.double, 1)
    plain = Recorder(small.client_app(small.double, lambda i: small.batches(i, dtype=torch.float64)))
    small.start(make("scaffold", update_dtype="model"), plain, small.double, 1)
    controls = kept(strategy, grid)
    for trip in plain.trips:
        x, y = decode(trip.sent["arrays"], "x"), decode(trip.reply["arrays"], "y")
        for n, c_i in controls[trip.client].items():
            torch.testing.assert_close(c_i, (x[n] - y[n]) / trip.reply["metrics"]["lr-sum"], rtol=1e-12, atol=1e-14)
    for n, c in strategy.state.control.items():
        torch.testing.assert_close(c, sum(c_i[n] for c_i in controls.values()) / len(CLIENTS), rtol=1e-12, atol=1e-14)


def test_fedsmoo_s_h_stays_the_mean_of_its_clients() -> None:
    """The server adds up what it sees, so clients must as well: rounding would part them round by round."""
    strategy, grid = make("fedsmoo", lamb=0.5), Recorder(small.client_app(small.convex))
    small.start(strategy, grid, small.convex, 8)
    for n, h in strategy.state.drift.items():
        mean = sum(state[f"drift/{n}"] for state in kept(strategy, grid).values()) / len(CLIENTS)
        torch.testing.assert_close(h, mean, rtol=1e-5, atol=1e-6)


# --- what is refused -------------------------------------------------------------------------------------------------


def altered(change: Callable[[RecordDict], RecordDict], **settings: Any) -> tuple[small.Run, small.Run]:
    """A round in which client 3's reply is changed on its way, and one in which it is lost."""

    def alter(_: int, client: str, content: RecordDict) -> RecordDict:
        return change(content) if client == "3" else content

    def lose(_: int, client: str, content: RecordDict) -> RecordDict | None:
        return None if client == "3" else content

    return tuple(
        small.start(
            make("fedavg", trainable=small.TRAINED, **settings),
            Recorder(small.client_app(small.everything), alter=how),
            small.everything,
            1,
        )
        for how in (alter, lose)
    )  # type: ignore[return-value]


def moved(content: RecordDict, value: float) -> RecordDict:
    """The reply with one entry of output.bias another."""
    d = decode(content["delta"], "delta")["output.bias"].clone()
    d[1] = value
    return with_array(content, "output.bias", raw_array(d), "delta")


def cut(content: RecordDict) -> RecordDict:
    array = content["delta"]["output.bias"]
    array.data = array.data[:-2]
    return content


GARBLED: dict[str, tuple[Callable[[RecordDict], RecordDict], str]] = {
    "missing": (lambda c: with_array(c, "output.bias", None, "delta"), "delta: 'output.bias' is missing"),
    "unknown": (
        lambda c: with_array(c, "output.bia", raw_array(torch.zeros(3)), "delta"),
        "delta: the global model has no array 'output.bia'; did you mean 'output.bias'?",
    ),
    "shape": (
        lambda c: with_array(c, "output.bias", raw_array(torch.zeros(4, dtype=torch.bfloat16)), "delta"),
        "delta/output.bias: expected shape [3], but got [4]",
    ),
    "dtype": (
        lambda c: with_array(c, "output.bias", raw_array(torch.zeros(3)), "delta"),
        "delta/output.bias: expected bfloat16, but got float32",
    ),
    "other dtype": (
        lambda c: with_array(c, "output.bias", numpy_array(torch.zeros(3, dtype=torch.float16)), "delta"),
        "delta/output.bias: expected bfloat16, but got float16",
    ),
    "cut": (cut, "delta/output.bias: shape [3] needs 6 bytes, but 4 came; it was cut or mislabelled"),
    "NaN": (lambda c: moved(c, np.nan), "delta/output.bias: expected finite numbers"),
    "infinite": (lambda c: moved(c, np.inf), "delta/output.bias: expected finite numbers"),
    "buffers": (
        lambda c: with_array(c, "norm.running_mean", raw_array(torch.full((4,), np.nan)), "buffers"),
        "buffers/norm.running_mean: expected finite numbers",
    ),
    "no record": (
        lambda c: RecordDict({n: r for n, r in c.items() if n != "delta"}),
        "arrays: 'scale' is missing",
    ),
}


@pytest.mark.parametrize("kind", GARBLED)
def test_a_garbled_record_is_dropped_by_name(kind: str) -> None:
    change, reason = GARBLED[kind]
    run, lost = altered(change)
    assert run.reports[0].failed.keys() == {"3"}
    assert run.reports[0].failed["3"].startswith(reason)
    assert bits(run.result.arrays) == bits(lost.result.arrays)


def test_a_sum_beyond_the_parameters_range_is_dropped_too() -> None:
    """Both x and d are finite, their sum isn't: it would cost the whole round its step."""

    def far() -> nn.Module:
        model = small.convex()
        model.state_dict()["bias"].fill_(3e38)
        return model

    def alter(_: int, client: str, content: RecordDict) -> RecordDict:
        far_away = torch.full((small.CLASSES,), 3e38, dtype=torch.bfloat16)
        return with_array(content, "bias", raw_array(far_away), "delta") if client == "3" else content

    run = small.start(make("fedavg"), Recorder(small.client_app(far), alter=alter), far, 1)
    assert run.reports[0].failed == {"3": "delta/bias: expected finite numbers, but it holds NaN or infinity"}


def test_displacements_that_nobody_asked_for_are_no_model() -> None:
    run, _ = altered(lambda content: content, update_dtype="model")
    assert not run.reports[0].failed

    def alter(_: int, client: str, content: RecordDict) -> RecordDict:
        return replaced(
            RecordDict({n: r for n, r in content.items() if n != "arrays"}),
            delta=content["arrays"],
            buffers=ArrayRecord(),
        )

    with pytest.raises(RunFailedError, match="expected an ArrayRecord 'arrays', but got"):
        small.start(
            make("fedavg", update_dtype="model", max_failed_rounds=1),
            Recorder(small.client_app(small.convex), alter=alter),
            small.convex,
            1,
        )


def test_a_movement_beyond_float16_is_reported_by_the_client_that_made_it() -> None:
    """One client's steps are huge: float16 can't hold them, bfloat16 and the model can."""

    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        optimizer = session.optimizer(lr=1e6 if client == 3 else 0.1)
        x, y = small.batches(client)[0]
        optimizer.step(lambda: nn.functional.cross_entropy(model(x), y))

    for dtype in ("bfloat16", "float16"):
        run = small.start(
            make("fedavg", update_dtype=dtype), Recorder(small.own_loop(small.convex, steps)), small.convex, 1
        )
        failed = run.reports[0].failed
        assert set(failed) == ({"3"} if dtype == "float16" else set())
    assert "PayloadError" in failed["3"]
    assert "delta/weight: an entry moved by " in failed["3"]
    assert "but float16 ends at 65504; set update-dtype to 'model', or lower the learning rate" in failed["3"]


def test_a_diverged_client_is_dropped_by_name() -> None:
    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        if client == 3:
            model.state_dict()["bias"][0] = np.nan

    run = small.start(make("fedavg"), Recorder(small.own_loop(small.convex, steps)), small.convex, 1)
    assert run.reports[0].failed == {"3": "delta/bias: expected finite numbers, but it holds NaN or infinity"}


@pytest.mark.parametrize("name", PARTS)
def test_methods_whose_clients_send_parts_refuse_it(name: str) -> None:
    with pytest.raises(ConfigError, match=r"update_dtype = 'float16' rounds the models .* send parts .* use 'model'"):
        ALGORITHMS[name].strategy(update_dtype="float16")
    with pytest.raises(ConfigError, match=rf"'update-dtype' = 'float16' rounds the models .* '{name}' they send parts"):
        config.parse({"algorithm": name, "update-dtype": "float16"})
    assert config.parse({"algorithm": name, "update-dtype": "model"}).strategy().update_dtype == "model"


@pytest.mark.parametrize("name", WHOLE)
def test_the_run_config_has_a_key_for_it(name: str) -> None:
    assert config.parse({"algorithm": name}).strategy().update_dtype == "model"
    assert config.parse({"algorithm": name, "update-dtype": "bfloat16"}).strategy().update_dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"'update-dtype' can't be 'float8'.*'model' \| 'bfloat16' \| 'float16'"):
        config.parse({"algorithm": name, "update-dtype": "float8"})


def test_noise_and_clipping_around_it_are_refused() -> None:
    wrapped = DifferentialPrivacyServerSideFixedClipping(make("fedavg"), 0.0, 0.05, len(CLIENTS))
    with pytest.raises(ConfigError, match=r"FedAvg can't run under DifferentialPrivacy.*use update_dtype='model'"):
        wrapped.start(InProcessGrid(small.client_app(small.convex), len(CLIENTS)), small.initial(small.convex), 1)

    inner, app = small.client_app(small.convex), ClientApp(mods=[LocalDpMod(0.05, 0.01, 50.0, 1e-5)])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        return inner(msg, context)

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        return inner(msg, context)

    with pytest.raises(RunFailedError, match=r"fedavg can't run under LocalDpMod: update_dtype sends"):
        small.start(make("fedavg", max_failed_rounds=1), Recorder(app), small.convex, 1)


def test_max_update_norm_bounds_what_was_restored() -> None:
    run = small.run(make("fedavg", max_update_norm=0.01), small.convex, 1)
    length = np.linalg.norm(small.vector(run.result.arrays) - small.vector(run.models[0]))
    assert 0.005 < length < 0.01 * (1 + 1e-5)


# --- the rounding itself ---------------------------------------------------------------------------------------------

NUMBERS = st.floats(-1e4, 1e4, allow_nan=False, width=32)


@given(
    xy=arrays.arrays(np.float64, st.tuples(st.just(2), st.integers(0, 9)), elements=NUMBERS),
    wide=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_what_is_restored_is_as_near_as_the_dtype_allows(xy: np.ndarray, wide: bool, dtype: torch.dtype) -> None:
    own = torch.float64 if wide else torch.float32
    x, y = ({"w": torch.from_numpy(row).to(own)} for row in xy)
    delta = deltas.rounded(y, x, dtype)
    assert delta["w"].dtype == dtype
    again = deltas.read(ArrayRecord({"w": raw_array(delta["w"])}), x, dtype)["w"]
    assert again.dtype == own
    gap, rounding = (y["w"] - x["w"]).abs().double(), torch.finfo(own).eps
    own_error = rounding * (gap + x["w"].abs().double() + y["w"].abs().double())
    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * gap + 2**-25 + own_error
    assert bool(((again - y["w"]).abs().double() <= bound).all())
    # What didn't move comes back to the bit, and the opposite movement as the opposite.
    still = deltas.restored(x, deltas.rounded(x, x, dtype))
    assert torch.equal(still["w"], x["w"])
    assert torch.equal(deltas.rounded(x, y, dtype)["w"], -delta["w"])


def test_a_half_precision_model_keeps_its_dtype() -> None:
    dtypes = {"w": torch.bfloat16, "v": torch.float16, "u": torch.float8_e4m3fn}
    x = {n: torch.tensor([1.0, -3.0]).to(dtype) for n, dtype in dtypes.items()}
    y = {n: torch.tensor([1.5, -3.5]).to(dtype) for n, dtype in dtypes.items()}
    for dtype in (torch.bfloat16, torch.float16):
        again = deltas.restored(x, deltas.rounded(y, x, dtype))
        assert all(again[n].dtype == x[n].dtype for n in x)
        assert all(torch.equal(again[n].float(), y[n].float()) for n in x)


def test_beyond_the_range() -> None:
    x, y = {"w": torch.tensor([0.0, -1.0])}, {"w": torch.tensor([65503.0, 65520.0])}
    with pytest.raises(PayloadError, match=r"delta/w: an entry moved by 6\.55e\+04, but float16 ends at 65504"):
        deltas.rounded(y, x, torch.float16)
    assert deltas.rounded(y, x, torch.bfloat16)["w"].isfinite().all()
    y = {"w": torch.tensor([torch.nan, 1e6])}
    assert deltas.rounded(y, x, torch.float16)["w"].isnan()[0]  # the server says who diverged
