"""Batches of tensors, and those of one client: ``client_data(run_config, node_config, seed=...)``."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedstrat.data.clients import Assignment, assign, others, setting
from fedstrat.data.partition import Indices
from fedstrat.data.sources import Source
from fedstrat.errors import ConfigError, DataError
from fedstrat.seeding import derive

EVALUATION_BATCH = 256

Augment = Callable[[Tensor, torch.Generator | None], Tensor]


class Batches:
    """Examples in memory, given out in batches; every iteration is a new epoch with an order of its own.

    The order depends on the generator alone, which stays on the CPU, so it is the same on every device. The
    last batch of an epoch may be smaller. Without examples there is no batch.

    Args:
        x: Inputs, shape (n, ...).
        y: Classes, shape (n,).
        batch_size: Examples per batch, at least 1.
        shuffle: Whether each epoch has a new random order.
        generator: Source of the orders and of ``augment``'s draws; None takes torch's global one.
        augment: Called with a batch of inputs and the generator, returns what is trained on instead.

    Raises:
        ConfigError: ``batch_size`` is below 1.
        DataError: ``x`` and ``y`` differ in length.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        *,
        shuffle: bool,
        generator: torch.Generator | None = None,
        augment: Augment | None = None,
    ) -> None:
        if len(x) != len(y):
            raise DataError(f"expected as many labels as inputs, but got {len(y)} labels for {len(x)} inputs")
        if batch_size < 1:
            raise ConfigError(f"expected a batch size (train.batch-size) of at least 1, but got {batch_size}")
        self.x = x
        self.y = y
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = generator
        self.augment = augment

    @property
    def num_examples(self) -> int:
        """How many examples one epoch has."""
        return len(self.y)

    def __len__(self) -> int:
        return math.ceil(len(self.y) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count, device = len(self.y), self.x.device
        order = torch.randperm(count, generator=self.generator) if self.shuffle else torch.arange(count)
        for start in range(0, count, self.batch_size):
            chosen = order[start : start + self.batch_size].to(device)
            x, y = self.x.index_select(0, chosen), self.y.index_select(0, chosen)
            yield (self.augment(x, self.generator) if self.augment else x), y

    def plain(self, batch_size: int | None = None) -> "Batches":
        """Return the same examples in their own order, neither shuffled nor augmented."""
        return Batches(self.x, self.y, batch_size or self.batch_size, shuffle=False)

    def to(self, device: torch.device | str) -> Self:
        """Move the examples to a device, once for all epochs; returns self."""
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


@dataclass(frozen=True)
class CropAndFlip:
    """Random crops of the image padded by 4 black pixels on each side, half of them mirrored left to right.

    Attributes:
        black: What a black pixel is after normalisation, per channel.
        padding: Pixels on each side.
    """

    black: tuple[float, ...]
    padding: int = 4

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return images of the same shape (n, channels, height, width), each with its own crop and flip."""
        count, channels, height, width = x.shape
        # Drawn on the CPU whatever the device, so that a seed means the same everywhere.
        shift = torch.randint(2 * self.padding + 1, (2, count, 1), generator=generator)
        mirrored = torch.rand(count, 1, generator=generator) < 0.5
        rows = shift[0] + torch.arange(height)
        across = torch.arange(width)
        columns = shift[1] + torch.where(mirrored, across.flip(0), across)
        black = torch.tensor(self.black, dtype=x.dtype, device=x.device).view(-1, 1, 1)
        inside_rows = slice(self.padding, self.padding + height)
        inside_columns = slice(self.padding, self.padding + width)
        padded = black.repeat(count, 1, height + 2 * self.padding, width + 2 * self.padding)
        padded[:, :, inside_rows, inside_columns] = x
        image, channel = torch.arange(count), torch.arange(channels)
        return padded[
            image.view(-1, 1, 1, 1).to(x.device),
            channel.view(1, -1, 1, 1).to(x.device),
            rows.view(count, 1, height, 1).to(x.device),
            columns.view(count, 1, 1, width).to(x.device),
        ]


@dataclass(frozen=True)
class ClientData:
    """One client's examples; each part is copied out of the data set when it is first asked for."""

    assignment: Assignment
    batch_size: int
    seed: int

    @functools.cached_property
    def train(self) -> Batches:
        """Shuffled training batches, augmented where the data set is."""
        source = self.assignment.source
        black = tuple(-mean / std for mean, std in zip(source.mean, source.std, strict=True))
        return Batches(
            *_tensors(source, self.assignment.train),
            self.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(derive(self.seed, "batches")),
            augment=CropAndFlip(black) if source.augmented else None,
        )

    @functools.cached_property
    def test(self) -> Batches:
        """Plain test batches."""
        return Batches(*_tensors(self.assignment.source, self.assignment.test), EVALUATION_BATCH, shuffle=False)

    @functools.cached_property
    def validation(self) -> Batches:
        """Plain validation batches."""
        return Batches(*_tensors(self.assignment.source, self.assignment.validation), EVALUATION_BATCH, shuffle=False)


def client_data(run_config: Mapping[str, object], node_config: Mapping[str, object], *, seed: int) -> ClientData:
    """Load one client's part; :mod:`fedstrat.data.clients` says which samples these are.

    Args:
        run_config: Flat, kebab-case: reads ``seed``, ``num-clients``, ``dataset.*`` and ``train.batch-size``.
        node_config: This client's.
        seed: Decides the order of the training batches and their augmentation, nothing else: derive it from
            the run's seed, the round and the client.

    Returns:
        Shuffled training batches, augmented for ``cifar10``, and plain test and validation batches; each may be empty.

    Raises:
        ConfigError: A key of the run config is missing or has another type.
        DataError: As :func:`fedstrat.data.clients.assign`.
    """
    return ClientData(assign(run_config, node_config), setting(run_config, "train.batch-size", int), seed)


def elsewhere(run_config: Mapping[str, object], node_config: Mapping[str, object]) -> Batches | None:
    """Load test samples of the other clients of a simulation; see :func:`fedstrat.data.clients.others`."""
    found = others(run_config, node_config)
    return None if found is None else Batches(*_tensors(found.source, found.test), EVALUATION_BATCH, shuffle=False)


def _tensors(source: Source, indices: Indices) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(source.features(indices)), torch.from_numpy(source.y[indices])
