"""The models of the zoo: plain `nn.Module`s, one architecture a module.

Every function builds a fresh model whose weights come from torch's global random stream, so that
`torch.manual_seed` decides them.
"""

from crossbow.zoo.captioner import captioner
from crossbow.zoo.gpt import gpt
from crossbow.zoo.lenet import lenet5
from crossbow.zoo.lstm import lstm_lm
from crossbow.zoo.mlp import mlp
from crossbow.zoo.resnet import resnet50, resnet_cifar
from crossbow.zoo.transformer import transformer
from crossbow.zoo.vgg import vgg16_bn_cifar

__all__ = [
    "captioner",
    "gpt",
    "lenet5",
    "lstm_lm",
    "mlp",
    "resnet50",
    "resnet_cifar",
    "transformer",
    "vgg16_bn_cifar",
]
