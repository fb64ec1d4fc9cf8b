"""Multilayer perceptron: linear layers with ReLU between them."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(sizes: Sequence[int] = (784, 256, 256, 10)) -> nn.Sequential:
    """Build a perceptron from its layers' widths, input first; samples are flattened."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])
