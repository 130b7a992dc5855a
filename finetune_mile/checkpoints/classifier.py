"""A network with the classifier of its file: for `load_classifier`, for `eval`, and as a teacher."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from PIL.Image import Image
from torch import Tensor, nn

from finetune_mile.checkpoints.init import Init, parse_source
from finetune_mile.checkpoints.loading import Opened, Preprocessor, keep_own_head, open_trunk, with_attributes
from finetune_mile.core.files import LARGEST_IMAGE, read_regular
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.images.pipeline import decode
from finetune_mile.networks.heads import get_head

BATCH = 64  # images of one forward pass of `predict`
Labels = list[tuple[str, float]]  # (class, probability), the most likely class first


def open_with_head(source: str | Init, flag: str) -> Opened:
    """A network in eval mode with the head that its file holds; the file is read once.

    Args:
        source: a run folder, an export, or a checkpoint file with a classifier.
        flag: for messages.
    """
    opened = open_trunk(parse_source(source, flag))
    if not opened.report.classifier:
        raise Problem(f"{flag} {source}: it has no classifier; give a finished run or a fine-tuned checkpoint")
    opened = keep_own_head(opened)
    opened.network.eval()
    return opened


def load_with_head(source: str | Init, flag: str) -> tuple[nn.Module, Preprocess, tuple[str, ...] | None]:
    """The same as a tuple: the network, its input convention, and its classes where the file names them."""
    opened = open_with_head(source, flag)
    return opened.network, opened.card.preprocess, opened.classes


# -------------------------------------------------------------------------------- for Python users


def load_public_classifier(source: str) -> nn.Module:
    """See `finetune_mile.load_classifier`."""
    opened = open_with_head(source, "load_classifier")
    preprocess = Preprocessor(opened.card.preprocess)
    predictor = Predictor(opened.network, opened.classes, preprocess, opened.activation or "softmax")
    return with_attributes(
        opened.network, card=opened.card, report=opened.report, preprocess=preprocess, classes=opened.classes,
        predict=predictor.predict,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """Images to labels with probabilities."""

    network: nn.Module
    classes: tuple[str, ...] | None
    preprocess: Preprocessor
    activation: str

    def predict(self, images: str | Path | Image | Sequence[str | Path | Image]) -> Labels | list[Labels]:
        """The labels of one image, or of each image of a list.

        Args:
            images: a path or a PIL image; or a list of them, which is processed in batches.
        """
        if not isinstance(images, list | tuple):
            return self._of([cast("str | Path | Image", images)])[0]
        return [labels for at in range(0, len(images), BATCH) for labels in self._of(images[at : at + BATCH])]

    @torch.inference_mode()
    def _of(self, images: Sequence[str | Path | Image]) -> list[Labels]:
        batch = torch.stack([self.preprocess(_read(image)) for image in images])
        logits = self.network(batch.to(next(self.network.parameters()).device)).float().cpu()
        chances = logits.sigmoid() if self.activation == "sigmoid" else logits.softmax(1)
        names = self.classes or tuple(str(i) for i in range(logits.shape[1]))
        values, order = chances.sort(dim=1, descending=True, stable=True)
        return [
            [(names[c], p) for c, p in zip(row, ps, strict=True)]
            for row, ps in zip(order.tolist(), values.tolist(), strict=True)
        ]


def _read(image: str | Path | Image) -> Image | Tensor:
    """A file as training and `eval` read it; anything else is left to `Preprocessor`."""
    if not isinstance(image, str | Path):
        return image
    try:
        return decode(read_regular(Path(image).expanduser(), LARGEST_IMAGE))
    except OSError as error:
        raise Problem(f"{image} cannot be read: {error.strerror}") from error
    except BadImage as error:
        raise Problem(f"{image} cannot be read as an image: {error}") from error


# ------------------------------------------------------------------------------------ as a teacher


def load_teacher(source: Init, *, classes: tuple[str, ...], seen: Preprocess) -> nn.Module:
    """The network behind --teacher, with its own head, ready for images in the convention `seen`."""
    network, own, known = load_with_head(source, "--teacher")
    size = get_head(network).out_features
    if size != len(classes):
        raise Problem(f"--teacher {source}: it knows {size} classes, the data has {len(classes)}")
    if known is not None and known != classes:
        raise Problem(f"--teacher {source}: its classes have other names or another order than the data's")
    return network if (own.mean, own.std) == (seen.mean, seen.std) else Renormalised(network, seen, own)


class Renormalised(nn.Module):
    """A network that expects images in the convention `own` and is given images (B, 3, H, W) in that of `seen`."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, seen: Preprocess, own: Preprocess) -> None:
        super().__init__()
        self.network = network
        seen_mean, seen_std, mean, std = (
            torch.tensor(v).view(3, 1, 1) for v in (seen.mean, seen.std, own.mean, own.std)
        )
        self.register_buffer("scale", seen_std / std)
        self.register_buffer("shift", (seen_mean - mean) / std)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images * self.scale + self.shift)
        return logits
