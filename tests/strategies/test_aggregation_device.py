"""``aggregation_device``: inner products are worked out elsewhere, and the run is that of the CPU up to rounding."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fedstrat.aggregation import conflict, device, gram, packs
from fedstrat.aggregation.conflict import craft_direction
from fedstrat.errors import ConfigError, RunFailedError
from fedstrat.runs import config
from fedstrat.runs.checkpoint import CheckpointFolder
from fedstrat.strategies import ALGORITHMS
from tests.strategies import small
from tests.strategies.small import Recorder, bits, start

BY_PRODUCTS = ("craft", "config", "fedfv", "fedmgdaplus", "fedlf")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Elsewhere(torch.Tensor):
    """A tensor of another device: nothing but its like may be combined with it, until it comes back by ``cpu()``."""

    operations = 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        strangers = [a for a in args if isinstance(a, torch.Tensor) and not isinstance(a, Elsewhere)]
        if strangers:
            raise RuntimeError("Expected all tensors to be on the same device")
        result = super().__torch_function__(func, types, args, kwargs or {})
        Elsewhere.operations += 1
        return result.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else result


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Make every strategy's products happen on such a device; the fixture tells how much did."""
    Elsewhere.operations = 0
    for module in (conflict, gram, packs):
        monkeypatch.setattr(module, "lent", lambda block: block.double().as_subclass(Elsewhere))
        monkeypatch.setattr(
            module, "zeros", lambda *shape: torch.zeros(shape, dtype=torch.float64).as_subclass(Elsewhere)
        )
    return lambda: Elsewhere.operations


def run(algorithm: str, **settings: Any) -> Any:
    model = small.everything if ALGORITHMS[algorithm].strategy.sends_model else small.convex
    trainable = small.TRAINED if model is small.everything else None
    own = {"seed": 7, "fraction_evaluate": 0.0, "trainable": trainable, **settings}
    strategy = ALGORITHMS[algorithm].strategy(**own, **({"pack_size": 4} if algorithm == "fedcspack" else {}))
    return start(strategy, Recorder(small.client_app(model)), model, 3, diagnostics="light")


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("algorithm", [*BY_PRODUCTS, "fedcspack", "scaffold"])
def test_what_is_multiplied_elsewhere_gives_the_same_run(
    algorithm: str, blocked: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """FedCSPACK and SCAFFOLD multiply for the diagnostics alone."""
    if blocked:  # float32 blocks of some columns, as of a large model
        monkeypatch.setattr(conflict, "BLOCK_COLUMNS", 5)
        monkeypatch.setattr(gram, "EXACT_NUMBERS", 0)
    here = run(algorithm)
    operations = request.getfixturevalue("elsewhere")
    there = run(algorithm)
    assert operations() > (20 if blocked else 5)
    for one, other in zip(here.models, there.models, strict=True):
        np.testing.assert_allclose(small.vector(other), small.vector(one), rtol=1e-5, atol=1e-5)
    for one, other in zip(here.reports, there.reports, strict=True):
        assert other.diagnostics.keys() == one.diagnostics.keys()
        assert "conflict-rate" in one.diagnostics
        assert other.diagnostics == pytest.approx(one.diagnostics, rel=1e-4, abs=1e-6)
        assert other.layers.keys() == one.layers.keys()


@pytest.mark.parametrize("single", [False, True])
def test_only_products_are_on_the_device(single: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without numbers: torch checks devices, dtypes and shapes of a GPU that needn't be there."""
    monkeypatch.setattr(gram, "EXACT_NUMBERS", 0)
    monkeypatch.setattr(gram, "in_range", lambda found: True)
    monkeypatch.setattr(conflict, "float", lambda number: 1.0, raising=False)
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(shape_env=shapes), device.products_on(torch.device("cuda")):
        x, *ys = ({"w": torch.ones(6, 4), "b": torch.ones(3)} for _ in range(4))
        rows = gram.Displacements(x, ys)
        blocks = [(block, torch.ones(block.shape[1])) for _, block in rows.blocks(single=single)]
        assert device.lent(blocks[0][0]).device.type == device.zeros(3, 3).device.type == "cuda"
        assert device.lent(blocks[0][0]).dtype == torch.float64
        inner = conflict.products(blocks, 3)
        sent = [(torch.tensor([0, 2]), torch.ones(2), torch.ones(2, 4))] * 3
        found = [rows.gram(single=single), inner.deltas, packs.gram(packs.to_packs(x, 4), sent, content="delta")]
        for products in found:
            assert (products.device.type, products.dtype, products.shape) == ("cpu", torch.float64, (3, 3))
        assert inner.reference.device.type == "cpu"


def test_a_device_that_fails_costs_no_round(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Another program may have taken its memory."""
    monkeypatch.setattr("fedstrat.strategies.base.choose_device", lambda name, key: torch.device("cuda:7"))

    def full(block: torch.Tensor) -> torch.Tensor:
        if device._device.get().type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return block

    for module in (conflict, gram):
        monkeypatch.setattr(module, "zeros", lambda *shape: torch.zeros(shape, dtype=torch.float64))
        monkeypatch.setattr(module, "lent", full)
    with caplog.at_level(logging.WARNING, "flwr"):
        done = run("craft", aggregation_device="cuda:7")
    told = [f"so the CPU worked out {part}: CUDA out of memory" for part in ("the step", "the diagnostics")] * 3
    lines = [line for line in caplog.messages if "aggregation_device = 'cuda:7' failed" in line]
    assert [line.partition("failed, ")[2] for line in lines] == told
    assert lines[2].startswith("round 2: ")
    monkeypatch.undo()
    for one, other in zip(run("craft").models, done.models, strict=True):
        assert bits(other) == bits(one)
    assert [r.trained for r in done.reports] == [small.CLIENTS] * 3


@pytest.mark.parametrize("error", [torch.linalg.LinAlgError, RuntimeError])
def test_a_step_that_fails_on_every_device_is_not_the_devices_fault(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fedstrat.strategies.base.choose_device", lambda name, key: torch.device("cuda:7"))

    def fail(*args: Any) -> Any:
        raise error("its own")

    monkeypatch.setattr(ALGORITHMS["craft"].strategy, "aggregate", fail)
    raised = RunFailedError if error is torch.linalg.LinAlgError else RuntimeError
    with caplog.at_level(logging.WARNING, "flwr"), pytest.raises(raised):
        run("craft", aggregation_device="cuda:7")
    assert "aggregation_device" not in caplog.text
    assert caplog.text.count("the step can't be computed") == (3 if raised is RunFailedError else 0)


@pytest.mark.parametrize(
    ("name", "why"),
    [("cuda:99", r"aggregation_device: 'cuda:99' was asked for"), ("mps", "float64"), ("gpu", "expected 'auto'")],
)
def test_a_device_that_isnt_there_is_told_before_round_1(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ALGORITHMS["craft"].strategy(aggregation_device=name)
    with pytest.raises(ConfigError, match=r"aggregation.device"):
        config.parse({"algorithm": "craft", "aggregation-device": name}).strategy()


def test_the_run_config_chooses_it_and_a_resumed_run_may_choose_another(tmp_path: Any) -> None:
    strategy = config.parse({"algorithm": "craft", "aggregation-device": "auto"}).strategy()
    assert strategy.products_device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    folder = CheckpointFolder(tmp_path, every=1)
    first = ALGORITHMS["craft"].strategy(seed=7, trainable=small.TRAINED, aggregation_device="auto")
    grid = Recorder(small.client_app(small.everything, test_data=small.batches))
    start(first, grid, small.everything, 1, checkpoints=folder)
    second = ALGORITHMS["craft"].strategy(seed=7, trainable=small.TRAINED, aggregation_device="cpu")
    done = start(second, grid, small.everything, 2, resume=folder.latest())
    assert [r.round for r in done.reports] == [2]


@GPU
@pytest.mark.parametrize("algorithm", BY_PRODUCTS)
def test_on_a_gpu(algorithm: str) -> None:
    for one, other in zip(run(algorithm).models, run(algorithm, aggregation_device="cuda").models, strict=True):
        np.testing.assert_allclose(small.vector(other), small.vector(one), rtol=1e-5, atol=1e-5)


@GPU
def test_a_gpu_may_be_set_to_round_products() -> None:
    """TF32 keeps ten binary digits; products are worked out in float64, so it plays no part."""
    deltas = torch.randn(8, 1 << 20)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with device.products_on(torch.device("cuda")):
            there = craft_direction(deltas, torch.ones(8))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    torch.testing.assert_close(there, craft_direction(deltas, torch.ones(8)), rtol=1e-6, atol=1e-9)
