"""`finetune_mile.load` and `finetune_mile.load_classifier`, the functions for Python users."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from finetune_mile.checkpoints.loading import load_network, open_trunk
from finetune_mile.checkpoints.preprocessing import Preprocessor
from finetune_mile.checkpoints.teachers import open_with_head
from finetune_mile.core.files import LARGEST_IMAGE, read_regular
from finetune_mile.core.problems import Problem
from finetune_mile.images.decoding import BadImage, decode

if TYPE_CHECKING:
    from PIL.Image import Image

BATCH = 64  # images of one forward pass of `predict`
Labels = list[tuple[str, float]]  # (class, probability), the most likely class first


def load_public(init: str, num_classes: int | None, arch: str | None) -> nn.Module:
    """See `finetune_mile.load`."""
    if num_classes is None:
        opened = open_trunk(init, arch=arch)
        network, card, report = opened.network, opened.card, opened.report
    else:
        network, card, report = load_network(init, arch=arch, num_classes=num_classes, head_bias="zero")
        if report.classifier == num_classes:
            warnings.warn(
                f"load({init!r}, num_classes={num_classes}) returns a new, untrained head and ignores the trained "
                f"classifier in the file; finetune_mile.load_classifier({init!r}) returns the trained one",
                stacklevel=3,
            )
    return _with_attributes(
        network, {"card": card, "report": report, "preprocess": Preprocessor(card.preprocess)}
    )  # fmt: skip


def load_public_classifier(source: str) -> nn.Module:
    """See `finetune_mile.load_classifier`."""
    opened = open_with_head(source, "load_classifier")
    preprocess = Preprocessor(opened.card.preprocess)
    predictor = Predictor(opened.network, opened.classes, preprocess, opened.activation or "softmax")
    attributes = {
        "card": opened.card, "report": opened.report, "preprocess": preprocess, "classes": opened.classes,
        "predict": predictor.predict,
    }  # fmt: skip
    return _with_attributes(opened.network, attributes)


def _with_attributes(network: nn.Module, attributes: Mapping[str, object]) -> nn.Module:
    for name, value in attributes.items():
        setattr(network, name, cast(nn.Module, value))
    return network.eval()


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
