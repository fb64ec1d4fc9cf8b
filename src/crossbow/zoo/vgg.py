"""VGG: plain stacks of 3 x 3 convolutions, pooled five times.

Simonyan and Zisserman, 2014 (arXiv:1409.1556), with batch norm; for CIFAR one linear layer stands
for the paper's three, whose 120 million parameters belong to 224 x 224 images.
"""

from torch import nn

from crossbow.zoo.resnet import he_init

_VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16_bn_cifar(num_classes: int = 100) -> nn.Sequential:
    """Build VGG-16 for images (3, 32, 32); 14,770,212 parameters at 100 classes."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in _VGG16:
        for width in stage:
            # no bias: batch norm would subtract it again
            layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return he_init(nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, num_classes)))
