"""Our resized crop has the pixels of torchvision's."""

import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from finetune_mile.core.types import Preprocess
from finetune_mile.images.pipeline import normalise, resized


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("layout", ["channels first", "channels last", "one channel expanded"])
def test_resized_equals_torchvisions(interpolation, layout):
    image = torch.randint(0, 256, (3, 90, 130), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    if layout == "channels last":
        image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    if layout == "one channel expanded":
        image = image[:1].expand(3, -1, -1)
    how = Preprocess(size=48, interpolation=interpolation)
    for box in ((0, 0, 90, 130), (10, 20, 30, 31), (5, 7, 48, 48), (89, 129, 1, 1)):
        theirs = tv.resized_crop(image, *box, [48, 48], InterpolationMode(interpolation), antialias=True)
        ours = resized(image, box, how)
        assert ours.dtype == torch.uint8
        assert torch.equal(ours, theirs)


def test_normalising_leaves_its_input_alone():
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.1]).view(3, 1, 1)
    for images in (torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4), torch.arange(48.0).view(1, 3, 4, 4)):
        before = images.clone()
        assert torch.equal(normalise(images, mean, std), (images.float() / 255.0 - mean) / std)
        assert torch.equal(images, before)
