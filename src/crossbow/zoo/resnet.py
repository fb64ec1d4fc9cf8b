"""Residual networks: a block computes what to add to its input.

He et al., Deep Residual Learning for Image Recognition, 2015 (arXiv:1512.03385); the convolutions
start as in He et al., Delving Deep into Rectifiers, 2015 (arXiv:1502.01852). Parameters are named
as in torchvision, so that its ResNet-50 weights load unchanged.
"""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from crossbow.errors import InputError


def resnet_cifar(depth: int, num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Build the paper's network for small images: three stages of n blocks, depth = 6n + 2.

    Made for 32 x 32; other sizes work too, such as digits of (1, 8, 8).
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise InputError(f"depth {depth} is not possible: give 6n + 2, such as 8, 20, 32 or 56")
    return he_init(
        nn.Sequential(
            OrderedDict(
                conv1=_conv(in_channels, 16, kernel_size=3),
                bn1=nn.BatchNorm2d(16),
                relu=nn.ReLU(inplace=True),
                layer1=_basic_stage(16, 16, blocks, stride=1),
                layer2=_basic_stage(16, 32, blocks, stride=2),
                layer3=_basic_stage(32, 64, blocks, stride=2),
                avgpool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                fc=nn.Linear(64, num_classes),
            )
        )
    )


def resnet50(num_classes: int = 1000) -> nn.Sequential:
    """Build ResNet-50 for images (3, 224, 224): v1.5, which strides in the 3 x 3 convolution."""
    return he_init(
        nn.Sequential(
            OrderedDict(
                conv1=_conv(3, 64, kernel_size=7, stride=2),
                bn1=nn.BatchNorm2d(64),
                relu=nn.ReLU(inplace=True),
                maxpool=nn.MaxPool2d(3, stride=2, padding=1),
                layer1=_bottleneck_stage(64, 64, blocks=3, stride=1),
                layer2=_bottleneck_stage(256, 128, blocks=4, stride=2),
                layer3=_bottleneck_stage(512, 256, blocks=6, stride=2),
                layer4=_bottleneck_stage(1024, 512, blocks=3, stride=2),
                avgpool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                fc=nn.Linear(2048, num_classes),
            )
        )
    )


def he_init(model: nn.Sequential) -> nn.Sequential:
    """Draw all convolutions anew so that ReLU layers keep the gradients' variance, in place."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions, and a shortcut without parameters (the paper's option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, kernel_size=3, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv(outputs, outputs, kernel_size=3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += self._shortcut(x)
        return F.relu(out, inplace=True)

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1 and self.new_channels == 0:
            return x
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two 1 x 1 ones that narrow its input and widen its output."""

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, kernel_size=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, kernel_size=3, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, 4 * width, kernel_size=1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, 4 * width, H / stride, W / stride)."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return F.relu(out, inplace=True)


def _basic_stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))


def _bottleneck_stage(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    outputs = 4 * width
    downsample = nn.Sequential(
        _conv(inputs, outputs, kernel_size=1, stride=stride), nn.BatchNorm2d(outputs)
    )
    first = Bottleneck(inputs, width, stride, downsample)
    return nn.Sequential(first, *(Bottleneck(outputs, width, 1, None) for _ in range(blocks - 1)))


def _conv(inputs: int, outputs: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image's size at stride 1; batch norm brings the bias."""
    return nn.Conv2d(
        inputs, outputs, kernel_size, stride=stride, padding=kernel_size // 2, bias=False
    )
