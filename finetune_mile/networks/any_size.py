"""timm's vision transformer for images of any size, and MoCo-v3's stem. Imports timm, so it is imported late.

B images, N patches, D features.
"""

import itertools
import math
from typing import Any, Literal

import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from finetune_mile.core.problems import Problem

Resize = Literal["timm", "plain", "offset"]


def resample(positions: Tensor, old: tuple[int, int], new: tuple[int, int], prefix: int, resize: Resize) -> Tensor:
    """Resize learnt positions (1, prefix + rows * columns, D) to another grid.

    Args:
        positions: of the first `prefix` tokens, which stay, and of the grid.
        old: rows and columns now.
        new: rows and columns wanted.
        prefix: tokens without a place in the grid.
        resize: `timm` as timm's `resample_abs_pos_embed` (bicubic with anti-aliasing; DINOv2 with registers does the
            same), `plain` as MAE, DeiT and transformers (bicubic), `offset` as DINO, iBOT and DINOv2 without registers
            (bicubic, by a scale factor that is slightly larger).
    """
    if old == new:
        return positions
    grid = positions[:, prefix:].float().unflatten(1, old).permute(0, 3, 1, 2)
    if resize == "offset":
        factors = [(side + 0.1) / before for side, before in zip(new, old, strict=True)]
        grid = functional.interpolate(grid, scale_factor=factors, mode="bicubic")
    else:
        grid = functional.interpolate(grid, size=new, mode="bicubic", antialias=resize == "timm")
    return torch.cat([positions[:, :prefix], grid.flatten(2).transpose(1, 2).to(positions.dtype)], dim=1)


class AnySize(VisionTransformer):  # type: ignore[misc]
    """A vision transformer whose positions are resized where the image has another size than they were learnt at.

    One that timm made with `dynamic_img_size` does so by itself.
    """

    resize: Resize
    pos_embed: nn.Parameter

    @property
    def _prefix(self) -> int:
        return 0 if self.no_embed_class else self.num_prefix_tokens

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Patches (B, N, D) to tokens with class token, registers and positions."""
        old = self.patch_embed.grid_size
        if self.dynamic_img_size or x.shape[1] == math.prod(old):
            tokens: Tensor = super()._pos_embed(x)
            return tokens
        side = math.isqrt(x.shape[1])
        if side * side != x.shape[1]:
            raise Problem("a vision transformer takes square images only")
        positions = resample(self.pos_embed, old, (side, side), self._prefix, self.resize)
        first = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        if self.no_embed_class:
            tokens = torch.cat([*first, x + positions], dim=1)
        else:
            tokens = torch.cat([*first, x], dim=1) + positions
        tokens = self.pos_drop(tokens)
        return tokens

    def set_image_size(self, size: int) -> None:
        """Resize the positions once, for square images."""
        embed, patch = self.patch_embed, self.patch_embed.patch_size[0]
        if size % patch:
            near = max(round(size / patch), 1) * patch
            raise Problem(f"size {size} is not a multiple of this vision transformer's patches of {patch}; use {near}")
        old, new = embed.grid_size, (size // patch, size // patch)
        embed.img_size, embed.grid_size, embed.num_patches = (size, size), new, math.prod(new)
        self.pos_embed = nn.Parameter(resample(self.pos_embed.detach(), old, new, self._prefix, self.resize).clone())


def allow_any_size(network: nn.Module, resize: Resize) -> None:
    """Turn one of timm's plain vision transformers into an `AnySize`, in place; other networks stay."""
    if type(network) is VisionTransformer and network.pos_embed is not None:
        vit: Any = network
        vit.__class__, vit.resize = AnySize, resize
        vit.patch_embed.strict_img_size = False


class ConvStem(PatchEmbed):  # type: ignore[misc]
    """MoCo-v3's patches of 16 pixels: four 3x3 convolutions of stride 2 with batch norm and ReLU, then a 1x1 one."""

    def __init__(self, *, embed_dim: int, in_chans: int = 3, bias: bool = True, **others: Any) -> None:
        super().__init__(embed_dim=embed_dim, in_chans=in_chans, bias=bias, **others)
        widths = [in_chans, *(embed_dim // part for part in (8, 4, 2, 1))]
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        self.proj = nn.Sequential(*layers, nn.Conv2d(embed_dim, embed_dim, 1))
