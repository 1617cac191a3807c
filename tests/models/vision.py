"""timm, lightly, segmentation_models_pytorch, monai, torchvision and anomalib: image models."""

from __future__ import annotations

import copy
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.models.trial import Trained, Trial

CLASSES = 4


class _Images(Trained):
    rate = 0.01

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        return self.net(batch[0])


class _Mixed(_Images):
    """With timm's mixup, which draws from NumPy's generator."""

    def __init__(self, net: nn.Module) -> None:
        from timm.data import Mixup

        super().__init__(net)
        self.mixup = Mixup(mixup_alpha=0.5, num_classes=CLASSES)

    def on_fit_start(self):
        import numpy as np

        np.random.seed(0)

    def training_step(self, batch, batch_idx):
        return super().training_step(self.mixup(*batch), batch_idx)


def vit():
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=CLASSES, dynamic_img_size=True
    )


def unet():
    import segmentation_models_pytorch as smp

    net = smp.Unet("resnet18", encoder_depth=3, encoder_weights=None, decoder_channels=(16, 8, 8), classes=CLASSES)
    net.encoder.layer3 = net.encoder.layer4 = nn.Identity()  # unused, and most of the memory of a comparison
    return net


def images(batches: int, sizes: tuple[int, ...] = (32,), *, masks: bool = False, seed: int = 0) -> DataLoader:
    """Batches of four, in turn in each of the sizes."""
    generator = torch.Generator().manual_seed(seed)

    def batch(size: int):
        shape = (4, size, size) if masks else (4,)
        x = torch.randn(4, 3, size, size, generator=generator)
        return x, torch.randint(CLASSES, shape, generator=generator)

    return DataLoader([batch(sizes[i % len(sizes)]) for i in range(batches)], batch_size=None)


class BYOL(Trained):
    """As in lightly's examples: an online and a momentum encoder."""

    rate = 0.01

    def __init__(self) -> None:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.projection_head = BYOLProjectionHead(16, 32, 16)
        self.prediction_head = BYOLPredictionHead(16, 32, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x):
        return self.prediction_head(self.projection_head(self.backbone(x)))

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x)).detach()

    def training_step(self, batch, batch_idx):
        from lightly.models.utils import update_momentum

        update_momentum(self.backbone, self.backbone_momentum, m=0.9)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.9)
        a, b = batch[0], batch[0].flip(-1)
        return 0.5 * (
            self.criterion(self.forward(a), self.forward_momentum(b))
            + self.criterion(self.forward(b), self.forward_momentum(a))
        )

    def validation_step(self, batch, batch_idx):
        return self.backbone(batch[0])


class Volumes(_Images):
    """Trains on patches, validates whole images by sliding windows."""

    def __init__(self) -> None:
        from monai.networks.nets import UNet

        net = UNet(spatial_dims=2, in_channels=1, out_channels=CLASSES, channels=(8, 16), strides=(2,), num_res_units=1)
        super().__init__(net)

    def validation_step(self, batch, batch_idx):
        from monai.inferers import sliding_window_inference

        return sliding_window_inference(batch, (32, 32), 4, self.net, overlap=0.25)


def patches(batches: int) -> DataLoader:
    return DataLoader([(x[:, :1], y) for x, y in images(batches, masks=True)], batch_size=None)


def whole_images(count: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    sizes = [(48 + 8 * (i % 4), 56 + 8 * (i % 3)) for i in range(count)]
    return DataLoader([torch.randn(1, 1, *size, generator=generator) for size in sizes], batch_size=None)


def stfpm():
    """anomalib's student and teacher. The teacher has new weights, because its own would be downloaded."""
    import timm
    from anomalib.models import Stfpm

    def random_weights(*args, pretrained, create=timm.create_model, **kwargs):
        return create(*args, **kwargs)

    with mock.patch("timm.create_model", random_weights):
        module = Stfpm(layers=["layer1"], pre_processor=False, post_processor=False, evaluator=False, visualizer=False)
    module.configure_optimizers = lambda: torch.optim.SGD(module.model.student_model.parameters(), lr=0.01)
    return module


def inspected(batches: int) -> DataLoader:
    from anomalib.data import ImageBatch

    return DataLoader([ImageBatch(image=x, gt_label=y > 0) for x, y in images(batches)], batch_size=None)


TRIALS = [
    Trial(
        name="anomalib STFPM",
        make=stfpm,
        train=lambda: inspected(16),  # torch 2.15 traces the validation four times because of tv_tensors.Image
        tolerance=0.05,  # its batches stay in float32, and values round to another side of a ReLU
    ),
    Trial(
        name="lightly BYOL with EMA",
        make=BYOL,
        train=lambda: images(20),
        validate=lambda: images(8, seed=1),
        tolerance=1e-2,  # batch norm over four samples amplifies rounding
    ),
    Trial(
        name="timm ViT, mixup, two sizes",
        make=lambda: _Mixed(vit()),
        train=lambda: images(24, (32, 48)),
        validate=lambda: images(8, (32, 48), seed=1),
    ),
    Trial(
        name="segmentation_models_pytorch U-Net",
        make=lambda: _Images(unet()),
        train=lambda: images(16, masks=True),
        validate=lambda: images(8, (32, 48), masks=True, seed=1),
        settings={"precision": "64-true"},  # in float32, values that round to another side of a ReLU move the gradients
    ),
    Trial(
        name="monai U-Net, sliding windows", make=Volumes, train=lambda: patches(16), validate=lambda: whole_images(8)
    ),
]
