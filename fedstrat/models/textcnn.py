"""Convolutional network for short texts.

Kim: "Convolutional Neural Networks for Sentence Classification", EMNLP 2014, https://arxiv.org/abs/1408.5882
(CNN-rand: words start at random). Differs from the paper: 128 dimensions a word for 300, and no dropout, so that two
passes over one batch see the same network.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedstrat.errors import ConfigError

EMBEDDING = 128
MAPS = 100
WIDTHS = (3, 4, 5)


class TextCNN(nn.Module):
    """Word vectors, convolutions over 3, 4 and 5 words with 100 maps each, maximum over the text, a linear layer.

    128 V + 153 900 parameters for the words and the convolutions and 301 K for the last layer, with V rows of the
    vocabulary and K classes: 1 438 114 for V = 10 000 and K = 14. Row 0, padding, stays zero.

    Args:
        input_shape: (max_length,), the number of word ids of one text, at least 5.
        num_classes: K, at least 1.
        vocab_size: V, the number of word ids, padding and unknown word included.

    Raises:
        ConfigError: The data aren't texts, or the texts are shorter than the widest convolution.
    """

    def __init__(self, *, input_shape: Sequence[int], num_classes: int, vocab_size: int = 0) -> None:
        super().__init__()
        if vocab_size < 2:
            raise ConfigError(
                f"model 'textcnn': expected texts, but the data have the shape {tuple(input_shape)} and no words;"
                " set dataset.name to 'dbpedia14' or 'csv', or model.name to 'mlp', which takes any shape"
            )
        if len(input_shape) != 1 or input_shape[0] < max(WIDTHS):
            raise ConfigError(
                f"model 'textcnn': expected texts of at least {max(WIDTHS)} words (dataset.max-length), but the data"
                f" have the shape {tuple(input_shape)}"
            )
        self.embedding = nn.Embedding(vocab_size, EMBEDDING, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(EMBEDDING, MAPS, width) for width in WIDTHS)
        self.linear = nn.Linear(MAPS * len(WIDTHS), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map word ids (B, max_length), integers in [0, V), to logits (B, num_classes)."""
        return self.classify(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Map word ids (B, max_length) to the largest value of every map, (B, 300)."""
        words = self.embedding(x).transpose(1, 2)
        maps = [torch.relu(convolution(words)).amax(dim=2) for convolution in self.convolutions]
        return torch.cat(maps, dim=1)

    def classify(self, z: Tensor) -> Tensor:
        """Map features (B, 300) to logits (B, num_classes)."""
        logits: Tensor = self.linear(z)
        return logits
