"""Built-in models, models by import path, trainable names and layer groups."""

import sys
from collections import Counter

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional

from fedstrat.aggregation.groups import merged
from fedstrat.errors import ConfigError
from fedstrat.models import MODELS, build, layer_groups, trainable_names
from fedstrat.models.resnet import Block, ResNet
from fedstrat.models.wideresnet import WideResNet


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
        ("resnet18", (3, 9, 7)),
        ("resnet18", (1, 8, 8)),
        ("wrn28-4", (4, 9, 7)),
        ("cnn-fashion", (1, 28, 28)),
        ("cnn-emnist", (2, 9, 6)),
        ("cnn-cifar", (3, 33, 40)),
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
        ("resnet18", (3, 32, 32), 10, (), 11_173_962),
        ("cnn-fashion", (1, 28, 28), 10, (), 100_816),
        ("cnn-fashion", (1, 28, 28), 62, (), 103_468),
        ("cnn-emnist", (1, 28, 28), 62, (), 3_787_710),
        ("cnn-cifar", (3, 32, 32), 10, (), 541_094),
        ("cnn-cifar", (3, 32, 32), 100, (), 586_184),
    ],
)
def test_published_parameter_counts(name, shape, classes, hidden, count):
    model = build(name, input_shape=shape, num_classes=classes, hidden=hidden)
    assert num_parameters(model) == count


def conv(fan_in, fan_out, side):
    """Parameters of a convolution without bias and of the norm behind it."""
    return fan_in * fan_out * side**2 + 2 * fan_out


def count_resnet(depth, classes):
    """He et al., section 4.2: 6n + 1 convolutions with a norm each, shortcuts without parameters."""
    n = (depth - 2) // 6
    stages = [conv(16, 16, 3) * 2 * n]
    stages += [conv(width // 2, width, 3) + conv(width, width, 3) * (2 * n - 1) for width in (32, 64)]
    return conv(3, 16, 3) + sum(stages) + 65 * classes


def count_resnet18(classes):
    """He et al., table 1: stages of four convolutions; from the second on a 1 x 1 shortcut."""
    later = [
        conv(width // 2, width, 3) + 3 * conv(width, width, 3) + conv(width // 2, width, 1) for width in (128, 256, 512)
    ]
    return conv(3, 64, 3) + 4 * conv(64, 64, 3) + sum(later) + 513 * classes


def count_wide(depth, widen, classes):
    """Zagoruyko and Komodakis, table 1: norms stand before convolutions, shortcuts have none."""
    n, total, fan_in = (depth - 4) // 6, 3 * 16 * 9, 16
    for width in (16 * widen, 32 * widen, 64 * widen):
        total += fan_in * width  # the shortcut of the first block
        for _ in range(n):
            total += 2 * fan_in + fan_in * width * 9 + 2 * width + width * width * 9
            fan_in = width
    return total + 2 * fan_in + (fan_in + 1) * classes


@pytest.mark.parametrize("classes", [10, 100])
def test_parameter_counts_follow_from_the_papers_tables(classes):
    def count(name):
        return num_parameters(build(name, input_shape=(3, 32, 32), num_classes=classes))

    for depth in (20, 32, 44, 56, 110):
        assert count(f"resnet{depth}") == count_resnet(depth, classes)
    assert count("resnet18") == count_resnet18(classes)
    assert count("wrn28-4") == count_wide(28, 4, classes) == {10: 5_849_050, 100: 5_872_180}[classes]


@pytest.mark.parametrize(("words", "classes"), [(2, 2), (10_000, 14)])
def test_textcnn_has_the_parameters_of_its_words_and_three_convolutions(words, classes):
    model = build("textcnn", input_shape=(16,), num_classes=classes, vocab_size=words)
    maps = sum(100 * (128 * width + 1) for width in (3, 4, 5))
    assert num_parameters(model) == words * 128 + maps + (300 + 1) * classes


def small(name, num_classes=3):
    """A small model of the catalogue, and a batch for it."""
    if name == "textcnn":
        return build(name, input_shape=(9,), num_classes=num_classes, vocab_size=7), torch.randint(0, 7, (4, 9))
    shape = (1, 28, 28) if name == "cnn-fashion" else (2, 8, 8)
    return build(name, input_shape=shape, num_classes=num_classes, hidden=(4,)), torch.randn(4, *shape)


@pytest.mark.parametrize("name", MODELS)
def test_reduced_precision_and_channels_last_compute_the_same_model(name):
    torch.manual_seed(0)
    model, x = small(name)
    expected = model(x)
    last = model.to(memory_format=torch.channels_last)
    y = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
    torch.testing.assert_close(last(y), expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(y)
    low = model.bfloat16()(y if name == "textcnn" else y.bfloat16())
    assert low.dtype == torch.bfloat16
    scale = expected.abs().max()
    for logits in (mixed, low):
        assert ((logits.float() - expected).abs() <= 0.1 * scale + 0.02).all()
    low.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_textcnn_is_blind_to_padding_behind_the_text_and_never_moves_its_row():
    model, _ = small("textcnn")
    assert not model.embedding.weight[0].any()
    model(torch.tensor([[3, 4, 5, 0, 0, 0, 0, 0, 0]])).sum().backward()
    grad = model.embedding.weight.grad
    assert not grad[0].any()
    assert grad[3:6].any(dim=1).all()


def test_textcnn_takes_the_largest_value_of_every_map():
    # Against a loop over places: dot products of windows of word vectors with the filters.
    torch.manual_seed(1)
    model, x = small("textcnn")
    vectors = model.embedding.weight[x]
    maxima = []
    for layer in model.convolutions:
        width = layer.kernel_size[0]
        windows = torch.stack([vectors[:, i : i + width].flatten(1) for i in range(9 - width + 1)])
        filters = layer.weight.transpose(1, 2).flatten(1)
        maxima.append((windows @ filters.T + layer.bias).relu().amax(dim=0))
    torch.testing.assert_close(model.features(x), torch.cat(maxima, dim=1))


def test_resnet18_is_torchvisions_with_another_stem_and_norm():
    ours = build("resnet18", input_shape=(3, 16, 16), num_classes=5)
    theirs = torchvision.models.resnet18(num_classes=5, norm_layer=lambda width: nn.GroupNorm(2, width))
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    with torch.no_grad():
        for parameter in ours.parameters():  # norms too, so that each has a place of its own
            parameter.add_(0.01 * torch.randn_like(parameter))
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
            a.copy_(b)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_wide_resnet_is_the_papers_equations():
    # x_{l+1} = h(x_l) + F(x_l), F = conv(relu(norm(conv(relu(norm(x)))))); where the shape changes, h is a 1 x 1
    # convolution of relu(norm(x)), as in the authors' code.
    model = WideResNet(depth=16, widen=2, input_shape=(3, 8, 8), num_classes=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    w = dict(model.named_parameters())

    def active(x, norm):
        return functional.group_norm(x, 2, w[f"{norm}.weight"], w[f"{norm}.bias"]).relu()

    out = functional.conv2d(x := torch.randn(2, 3, 8, 8), w["conv1.weight"], padding=1)
    for stage in range(3):
        for place in range(2):
            block = f"stages.{stage}.{place}"
            stride = 2 if stage > 0 and place == 0 else 1
            first = active(out, f"{block}.norm1")
            inner = functional.conv2d(first, w[f"{block}.conv1.weight"], stride=stride, padding=1)
            residual = functional.conv2d(active(inner, f"{block}.norm2"), w[f"{block}.conv2.weight"], padding=1)
            kept = functional.conv2d(first, w[f"{block}.shortcut.weight"], stride=stride) if place == 0 else out
            out = kept + residual
    logits = active(out, "norm").mean(dim=(2, 3)) @ w["linear.weight"].T + w["linear.bias"]
    torch.testing.assert_close(model(x), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "layers"),
    [
        ("cnn-fashion", (1, 28, 28), "c5 r p c5 r p f l r l l"),
        ("cnn-emnist", (1, 28, 28), "c3 r p c3 r p f l l l"),
        ("cnn-cifar", (3, 32, 32), "c3 r p c3 r p c3 r p f l r l"),
    ],
)
def test_the_networks_of_fedcspack_layer_by_layer(name, shape, layers):
    model = build(name, input_shape=shape, num_classes=6)
    left = [parameter.detach() for parameter in model.parameters()]
    expected = x = torch.randn(2, *shape)
    for layer in layers.split():
        if layer[0] in "cl":
            weight, bias = left.pop(0), left.pop(0)
            padding = 1 if layer == "c3" else 0
            expected = (
                expected @ weight.T + bias
                if layer == "l"
                else functional.conv2d(expected, weight, bias, padding=padding)
            )
        else:
            step = {"r": torch.relu, "p": nn.MaxPool2d(2), "f": nn.Flatten()}[layer]
            expected = step(expected)
    assert not left
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet18", "wrn28-4"])
def test_group_norm_with_two_groups_and_no_output_that_depends_on_the_batch(name):
    model, x = small(name)
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert {norm.num_groups for norm in norms} == {2}
    assert len(norms) == {"resnet18": 20, "wrn28-4": 25}[name]
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


def test_resnet18_halves_three_times_and_wrn_twice():
    x = torch.randn(1, 3, 32, 32)
    resnet, wide = (build(name, input_shape=(3, 32, 32), num_classes=2) for name in ("resnet18", "wrn28-4"))
    assert resnet.stages(resnet.conv1(x)).shape == (1, 512, 4, 4)
    assert wide.stages(wide.conv1(x)).shape == (1, 256, 8, 8)


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_have_no_buffers_and_a_seed_decides_their_weights(name):
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model, _ = small(name)
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
        ({"name": "transformer"}, "There are mlp, cnn, .*resnet20"),
        ({"name": "my_pkg.module.Net"}, "my_pkg.module:Factory"),
        ({"name": "mlp", "hidden": (10, 0)}, "hidden widths"),
        ({"name": "cnn", "input_shape": (64,)}, r"shape \(64,\)"),
        ({"name": "cnn", "input_shape": (1, 3, 30)}, "at least 4 x 4"),
        ({"name": "resnet20", "input_shape": (28, 28)}, r"shape \(28, 28\)"),
        ({"name": "mlp", "num_classes": 0}, "at least 1 class"),
        ({"name": "mlp", "input_shape": (0,)}, "positive input sizes"),
        ({"name": "resnet18", "input_shape": (28, 28)}, r"'resnet18': .* shape \(28, 28\)"),
        ({"name": "wrn28-4", "input_shape": (64,)}, r"'wrn28-4': .* shape \(64,\)"),
        ({"name": "cnn-cifar", "input_shape": (3, 7, 32)}, r"'cnn-cifar': .* 3 convolutions"),
        ({"name": "textcnn"}, "'textcnn': expected texts.*'dbpedia14' or 'csv'"),
        ({"name": "textcnn", "input_shape": (4,), "vocab_size": 9}, r"at least 5 words \(dataset.max-length\)"),
        ({"name": "mlp", "input_shape": (4,), "vocab_size": 9}, "'mlp': expected numbers.* textcnn reads them"),
    ],
)
def test_an_impossible_model_is_a_config_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(**{"input_shape": (1, 8, 8), "num_classes": 10, **settings})


@pytest.mark.parametrize("depth", [4, 20, 27])
def test_a_wide_resnet_depth_is_6n_plus_4(depth):
    with pytest.raises(ConfigError, match=rf"6n \+ 4 .* got {depth}"):
        WideResNet(depth=depth, widen=1, input_shape=(3, 8, 8), num_classes=2)


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


def test_groups_of_the_other_networks():
    sizes = group_sizes(build("resnet18", input_shape=(3, 32, 32), num_classes=10))
    assert len(sizes) == 21  # 17 convolutions, 3 shortcuts, the linear layer; each norm is with its convolution
    assert sizes["conv1"] == conv(3, 64, 3)
    assert sizes["stages.1.0.shortcut.0"] == conv(64, 128, 1)
    sizes = group_sizes(build("wrn28-4", input_shape=(3, 32, 32), num_classes=10))
    assert len(sizes) == 25 + 3 + 1 + 12 + 1  # convolutions, shortcuts, linear, first norms of blocks, last norm
    assert sizes["stages.0.0.norm1"] == 2 * 16
    assert sizes["stages.0.0.conv1"] == conv(16, 64, 3)
    assert sizes["stages.0.0.conv2"] == 64 * 64 * 9
    assert sizes["norm"] == 2 * 256
    assert len(group_sizes(small("textcnn")[0])) == 5
    assert {len(group_sizes(small(f"cnn-{name}")[0])) for name in ("fashion", "emnist", "cifar")} == {5}


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


@pytest.mark.parametrize("name", [name for name in MODELS if name != "textcnn"])
def test_merged_groups_by_shapes_are_those_of_the_model(name):
    shape = (3, 32, 32) if name.startswith(("resnet", "wrn")) or name == "cnn-cifar" else (1, 28, 28)
    model = build(name, input_shape=shape, num_classes=10, hidden=[20, 20])
    expected = layer_groups(model)
    assert merged(dict(model.named_parameters())) == expected
    if name == "resnet20":
        assert len(set(expected.values())) == 20
