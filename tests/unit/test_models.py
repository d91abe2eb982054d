"""Built-in models, models by import path, trainable names and layer groups."""

import sys
from collections import Counter

import pytest
import torch
from torch import nn

from fedstrat.errors import ConfigError
from fedstrat.models import MODELS, build, layer_groups, trainable_names
from fedstrat.models.resnet import Block, ResNet


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def group_sizes(model):
    parameters = dict(model.named_parameters())
    sizes = Counter()
    for name, group in layer_groups(model).items():
        sizes[group] += parameters[name].numel()
    return sizes


# ---------------------------------------------------------------------------------------- built-in models


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (64,)),
        ("mlp", (1, 8, 8)),
        ("mlp", (3, 32, 32)),
        ("mlp", ()),
        ("cnn", (1, 28, 28)),
        ("cnn", (3, 32, 32)),
        ("cnn", (1, 8, 8)),
        ("cnn", (2, 4, 5)),
        ("cnn", (1, 16, 15)),
        ("cnn", (1, 16, 16)),
        ("cnn", (3, 33, 47)),
        ("resnet20", (3, 32, 32)),
        ("resnet20", (1, 28, 28)),
        ("resnet20", (1, 8, 8)),
        ("resnet20", (4, 9, 7)),
    ],
)
def test_logits_and_gradients_for_every_parameter(name, shape):
    model = build(name, input_shape=shape, num_classes=7, hidden=(5, 4))
    logits = model(torch.randn(3, *shape))
    assert logits.shape == (3, 7)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "hidden", "count"),
    [
        ("mlp", (1, 28, 28), 62, (200, 200), 209_662),
        ("mlp", (64,), 10, (100,), 64 * 100 + 100 + 100 * 10 + 10),
        ("mlp", (64,), 10, (), 64 * 10 + 10),
        ("cnn", (1, 28, 28), 10, (), 44_426),
        ("cnn", (3, 32, 32), 10, (), 62_006),
        ("resnet20", (3, 32, 32), 10, (), 269_722),
        ("resnet20", (3, 32, 32), 100, (), 275_572),
        ("resnet56", (3, 32, 32), 10, (), 853_018),
        ("resnet110", (3, 32, 32), 10, (), 1_727_962),
    ],
)
def test_published_parameter_counts(name, shape, classes, hidden, count):
    model = build(name, input_shape=shape, num_classes=classes, hidden=hidden)
    assert num_parameters(model) == count


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_have_no_buffers_and_a_seed_decides_their_weights(name):
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model = build(name, input_shape=(1, 8, 8), num_classes=3, hidden=(4,))
        assert not list(model.buffers())
        states.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_mlp_is_linear_relu_linear():
    model = build("mlp", input_shape=(2,), num_classes=1, hidden=(2,)).double()
    with torch.no_grad():
        for parameter, value in zip(
            model.parameters(), ([[1.0, 0.0], [0.0, 1.0]], [0.0, -3.0], [[2.0, 5.0]], [-1.0]), strict=True
        ):
            parameter.copy_(torch.tensor(value))
    # hidden = relu((4, 2 - 3)) = (4, 0), output = 2·4 + 5·0 − 1; then relu((−1, 4 − 3)) = (0, 1), 5 − 1
    assert model(torch.tensor([[4.0, 2.0], [-1.0, 4.0]]).double()).tolist() == [[7.0], [4.0]]


def test_resnet_shortcut_takes_every_second_pixel_and_pads_channels_with_zeros():
    block = Block(2, 4, stride=2)
    nn.init.zeros_(block.norm2.weight)  # the residual branch vanishes
    x = torch.rand(1, 2, 4, 6)
    out = block(x)
    assert out.shape == (1, 4, 2, 3)
    assert torch.equal(out[:, 1:3], x[:, :, ::2, ::2])
    assert not out[:, [0, 3]].any()


def test_resnet_starts_kaiming_normal():
    model = ResNet(depth=20, input_shape=(3, 32, 32), num_classes=1000)
    assert model.stage3[1].conv1.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)
    assert model.linear.weight.std().item() == pytest.approx((2 / 64) ** 0.5, rel=0.05)


def test_a_resnet_output_does_not_depend_on_the_rest_of_the_batch():
    model = build("resnet20", input_shape=(3, 16, 16), num_classes=4)
    x = torch.randn(5, 3, 16, 16)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "resnet-20"}, r"unknown model 'resnet-20'; did you mean 'resnet20'\?"),
        ({"name": "transformer"}, "There are mlp, cnn, resnet20"),
        ({"name": "my_pkg.module.Net"}, "my_pkg.module:Factory"),
        ({"name": "mlp", "hidden": (10, 0)}, "hidden widths"),
        ({"name": "cnn", "input_shape": (64,)}, r"shape \(64,\)"),
        ({"name": "cnn", "input_shape": (1, 3, 30)}, "at least 4 x 4"),
        ({"name": "resnet20", "input_shape": (28, 28)}, r"shape \(28, 28\)"),
        ({"name": "mlp", "num_classes": 0}, "at least 1 class"),
        ({"name": "mlp", "input_shape": (0,)}, "positive input sizes"),
    ],
)
def test_an_impossible_model_is_a_config_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(**{"input_shape": (1, 8, 8), "num_classes": 10, **settings})


@pytest.mark.parametrize("depth", [2, 18, 21])
def test_a_resnet_depth_is_6n_plus_2(depth):
    with pytest.raises(ConfigError, match="6n"):
        ResNet(depth=depth, input_shape=(3, 32, 32), num_classes=10)


# ---------------------------------------------------------------------------------------- import paths

OWN_MODELS = """
from torch import nn

class Net(nn.Linear):
    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape[0], num_classes)

class Fixed(nn.Linear):
    def __init__(self):
        super().__init__(1, 2)

class Outer:
    @staticmethod
    def make(*, num_classes, width=3):
        return nn.Linear(width, num_classes)

def anything(**settings):
    return Net(**settings)

def positional_only(input_shape=(9,), /, num_classes=2):
    return Net(input_shape, num_classes)

def needs_more(depth):
    return nn.Linear(depth, 1)

def fails():
    raise RuntimeError("no such width")

def a_list():
    return [1]

built = Fixed()
number = 3
"""


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    package = tmp_path / "own_models_pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "zoo.py").write_text(OWN_MODELS)
    (package / "broken_syntax.py").write_text("def (:\n")
    (package / "broken_import.py").write_text("\nimport a_package_nobody_has\n")
    (package / "broken_name.py").write_text("from own_models_pkg.zoo import Missing\n")
    (package / "broken_code.py").write_text("\n\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("own_models_pkg")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("factory", "sizes"),
    [
        ("Net", (5, 4)),
        ("Fixed", (1, 2)),
        ("Outer.make", (3, 4)),
        ("anything", (5, 4)),
        ("positional_only", (9, 4)),
    ],
)
def test_own_factories_get_the_keywords_that_they_accept(own_models, factory, sizes):
    model = build(f"own_models_pkg.zoo:{factory}", input_shape=(5,), num_classes=4, hidden=(8,))
    assert (model.in_features, model.out_features) == sizes


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package_here:Net", "no module 'no_such_package_here'"),
        ("own_models_pkg.zoos:Net", r"no module 'own_models_pkg\.zoos'"),
        ("own_models_pkg.zoo.inner:Net", r"no module 'own_models_pkg\.zoo\.inner'"),
        ("own_models_pkg.zoo:Nets", r"has no 'Nets'; did you mean 'Net'\?"),
        ("own_models_pkg.zoo:Outer.mak", r"did you mean 'make'\?"),
        ("own_models_pkg.zoo:a_list", "to return a torch.nn.Module, but got an object of type list"),
        ("own_models_pkg.zoo:built", "but it is a model"),
        ("own_models_pkg.zoo:number", "an object of type int"),
        ("own_models_pkg.zoo:needs_more", r"calling it as \(\) raised TypeError: .*depth"),
        ("own_models_pkg.zoo:fails", r"RuntimeError: no such width \(.*zoo\.py, line \d+\)"),
        ("own_models_pkg.broken_syntax:Net", r"SyntaxError: .*broken_syntax\.py, line 1"),
        ("own_models_pkg.broken_import:Net", r"a_package_nobody_has.*broken_import\.py, line 2\)"),
        ("own_models_pkg.broken_name:Net", "ImportError: cannot import name 'Missing'"),
        ("own_models_pkg.broken_code:Net", r"ZeroDivisionError: .*broken_code\.py, line 3\)"),
        (":Net", "expected an import path of the form"),
        ("own_models_pkg.zoo:", "expected an import path of the form"),
        (".zoo:Net", "expected an import path of the form"),
        ("own_models_pkg/zoo.py:Net", "expected an import path of the form"),
        ("own_models_pkg:zoo:Net", "expected an import path of the form"),
    ],
)
def test_an_unusable_import_path_is_one_sentence_that_names_it(own_models, path, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(path, input_shape=(5,), num_classes=4)
    assert str(caught.value).startswith(f"model '{path}': ")
    assert "\n" not in str(caught.value)


def test_an_import_error_shows_no_traceback_from_inside_importlib(own_models):
    with pytest.raises(ConfigError) as caught:
        build("own_models_pkg.broken_code:Net", input_shape=(5,), num_classes=4)
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


# ---------------------------------------------------------------------------------------- names and groups


@pytest.mark.parametrize("depth", [20, 56, 110])
def test_resnet_has_as_many_groups_as_layers(depth):
    model = ResNet(depth=depth, input_shape=(3, 32, 32), num_classes=10)
    sizes = group_sizes(model)
    assert len(sizes) == depth
    assert min(sizes.values()) == sizes["conv1"] == 464  # 16·3·9 weights, 16 scales, 16 shifts
    assert sum(sizes.values()) == num_parameters(model)
    assert sizes["linear"] == 650


def test_mlp_has_one_group_per_linear_layer():
    model = build("mlp", input_shape=(784,), num_classes=62, hidden=(200, 200))
    assert sorted(group_sizes(model).values()) == [200 * 62 + 62, 200 * 200 + 200, 784 * 200 + 200]


class Mixed(nn.Module):
    """Every case of the grouping rule at once."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.norm0 = nn.LayerNorm(3)  # no convolution yet
        self.conv = nn.Conv2d(3, 4, 3)
        self.act = nn.ReLU()
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 4)
        self.norm1 = nn.LayerNorm(4)  # a linear layer came in between
        self.inner = nn.Sequential(nn.ConvTranspose1d(4, 4, 1), nn.GroupNorm(1, 4), nn.GroupNorm(2, 4))
        self.norm2 = nn.GroupNorm(1, 4)  # the convolution is another module's child
        self.attention = nn.MultiheadAttention(4, 1)


def test_groups_of_each_kind_of_module():
    assert layer_groups(Mixed()) == {
        "token": "token",
        "norm0.weight": "norm0",
        "norm0.bias": "norm0",
        "conv.weight": "conv",
        "conv.bias": "conv",
        "bn.weight": "conv",
        "bn.bias": "conv",
        "fc.weight": "fc",
        "fc.bias": "fc",
        "norm1.weight": "norm1",
        "norm1.bias": "norm1",
        "inner.0.weight": "inner.0",
        "inner.0.bias": "inner.0",
        "inner.1.weight": "inner.0",
        "inner.1.bias": "inner.0",
        "inner.2.weight": "inner.0",
        "inner.2.bias": "inner.0",
        "norm2.weight": "norm2",
        "norm2.bias": "norm2",
        "attention.in_proj_weight": "attention.in_proj_weight",
        "attention.in_proj_bias": "attention.in_proj_bias",
        "attention.out_proj.weight": "attention.out_proj",
        "attention.out_proj.bias": "attention.out_proj",
    }


def test_a_model_that_is_one_layer_is_one_group():
    assert layer_groups(nn.Linear(2, 1)) == {"weight": "", "bias": ""}


def test_frozen_and_tied_parameters_and_buffers():
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(6, 4),
            "conv": nn.Conv1d(4, 4, 1),
            "norm": nn.BatchNorm1d(4),
            "head": nn.Linear(4, 6),
        }
    )
    model["head"].weight = model["embed"].weight
    model["conv"].requires_grad_(False)
    assert trainable_names(model) == ("embed.weight", "norm.weight", "norm.bias", "head.bias")
    assert layer_groups(model) == {
        "embed.weight": "embed",
        "norm.weight": "conv",  # the norm's place doesn't change with what is frozen
        "norm.bias": "conv",
        "head.bias": "head",
    }
