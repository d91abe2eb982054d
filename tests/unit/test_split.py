"""Where a model's representation ends, and models that stay as they are."""

import pytest
import torch
from torch import nn

from fedstrat.errors import ConfigError
from fedstrat.local.frozen import frozen_copy
from fedstrat.models import MODELS, build
from fedstrat.models.split import check_split, split

NAMES = {
    "mlp": ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"],
    "cnn": [f"{m}.{p}" for m in ("conv1", "conv2", "fc1", "fc2", "fc3") for p in ("weight", "bias")],
}
WIDTHS = {
    "mlp": 5,
    "cnn": 84,
    "cnn-fashion": 50,
    "cnn-emnist": 512,
    "cnn-cifar": 500,
    "resnet18": 512,
    "wrn28-4": 256,
    "textcnn": 300,
}


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_end_their_representation_before_the_last_layer(name: str) -> None:
    if name == "textcnn":
        model, x = build(name, input_shape=(9,), num_classes=3, vocab_size=7), torch.randint(0, 7, (2, 9))
    else:
        shape = (1, 28, 28) if name == "cnn-fashion" else (1, 8, 8)
        model, x = build(name, input_shape=shape, num_classes=3, hidden=(5,)), torch.randn(2, *shape)
    features, classify = split(model)
    z = features(x)
    assert z.shape == (2, WIDTHS.get(name, 64))
    assert torch.equal(classify(z), model(x))
    assert [n for n, _ in model.named_parameters()] == NAMES.get(name, [n for n, _ in model.named_parameters()])
    last = [p for n, p in model.named_parameters() if p.shape[0] == 3]
    grads = torch.autograd.grad(z.sum(), list(model.parameters()), allow_unused=True)
    unreached = [p for p, g in zip(model.parameters(), grads, strict=True) if g is None]
    assert [id(p) for p in unreached] == [id(p) for p in last[-2:]]
    check_split(model, x)


def test_softmax_regression_represents_by_its_input() -> None:
    model = build("mlp", input_shape=(2, 3), num_classes=2)
    assert split(model).features(torch.ones(4, 2, 3)).shape == (4, 6)


class Parts(nn.Module):
    def __init__(self, factor: float = 1.0, width: int = 3) -> None:
        super().__init__()
        self.encoder, self.classifier, self.factor = nn.Linear(4, 3), nn.Linear(width, 2), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * (self.classifier(self.encoder(x)) if self.classifier.in_features == 3 else x[:, :2])


def test_submodules_named_encoder_and_classifier_are_a_split() -> None:
    model = Parts()
    assert split(model) == (model.encoder, model.classifier)
    check_split(model, torch.randn(5, 4))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 2), r"Linear doesn't say where .* features\(x\) and classify\(z\).* encoder and classifier"),
        (Parts(factor=2.0), "they differ"),
        (Parts(width=7), "can't be computed .RuntimeError"),
    ],
)
def test_a_missing_or_wrong_split_is_named(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_split(model, torch.randn(5, 4))


def test_a_frozen_copy_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout())
    model[1].weight = model[0].bias  # tied
    copy = frozen_copy(model, {"0.weight": torch.full((3, 2), 7.0), "1.running_mean": torch.ones(3)})
    before = {n: t.clone() for n, t in copy.state_dict().items()}
    assert bool((before["0.weight"] == 7.0).all())
    assert bool((before["1.running_mean"] == 1.0).all())
    assert copy[1].weight is copy[0].bias
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    copy(torch.randn(4, 2))
    assert all(torch.equal(t, before[n]) for n, t in copy.state_dict().items())
    assert model.training
    assert model[0].weight.requires_grad
