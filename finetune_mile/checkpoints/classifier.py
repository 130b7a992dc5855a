"""A network with the classifier of its file: for `load_classifier`, and as a teacher."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, cast, overload

import numpy.typing as npt
import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from PIL.Image import Image
from torch import Tensor, nn

from finetune_mile.checkpoints.exporting import CONFIG, write_export
from finetune_mile.checkpoints.init import Init, parse_source
from finetune_mile.checkpoints.loading import Opened, Preprocessor, open_with_head
from finetune_mile.compute.passes import show
from finetune_mile.core.files import LARGEST_IMAGE, read_regular, write_whole
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.images.pipeline import decode
from finetune_mile.networks.heads import get_head

BATCH = 64  # images of one forward pass of `predict`
Picture = str | Path | Image | npt.NDArray[Any] | Tensor
Labels = list[tuple[str, float]]  # (class, probability), the most likely class first


# -------------------------------------------------------------------------------- for Python users


class ImageClassifier(nn.Module, ModelHubMixin):
    """The trained classifier of a run, in eval mode: images (B, 3, H, W) to logits (B, C).

    `save_pretrained(folder)`, `push_to_hub("owner/name")` and `ImageClassifier.from_pretrained(folder or "owner/name")`
    write and read a run's export.
    """

    def __new__(cls, *_: object) -> Self:  # the mixin's would copy the weights into a config of its own
        return super(ModelHubMixin, cls).__new__(cls)

    def __init__(self, opened: Opened, model_card: str | None = None) -> None:
        """Take an opened checkpoint with its own head; `model_card` is the README.md beside it."""
        super().__init__()
        report, own = opened.report, opened.config if opened.own else {}
        self.network = opened.network
        self.classes = opened.classes  # C names, or None where the file names none
        self.activation = opened.activation or "softmax"
        names = self.classes or tuple(map(str, range(report.classifier)))
        limits = opened.thresholds(report.arch).tolist()
        self.thresholds = dict(zip(names, limits, strict=True))  # above which `finetune-mile predict` prints a label
        self.preprocess = Preprocessor(opened.card.preprocess)
        self.card, self.report, self.model_card = opened.card, report, model_card
        self.config: dict[str, Any] = own | opened.card.preprocess.model_dump(mode="json") | {
            "arch": report.arch, "padding": report.padding, "num_classes": report.classifier,
            "activation": self.activation, "classes": None if self.classes is None else list(self.classes),
        }  # fmt: skip
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) in the convention of `preprocess` to logits (B, C)."""
        logits: Tensor = self.network(images)
        return logits

    @overload
    def predict(self, images: Picture) -> Labels: ...  # type: ignore[overload-overlap]  # text is a sequence too

    @overload
    def predict(self, images: Sequence[Picture]) -> list[Labels]: ...

    def predict(self, images: Picture | Sequence[Picture]) -> Labels | list[Labels]:
        """The labels of one image, or of each image of a list: (class, probability), the most likely class first.

        Probabilities are softmax or sigmoid, as the network was trained. Where no names are known, classes are "0", ...

        Args:
            images: a path, a PIL image, an array uint8 (H, W, 3) or (H, W), or a tensor uint8 (3, H, W). Several
                images are a list of these, or an array or tensor with one more dimension in front. Lists are
                processed in batches.
        """
        if getattr(images, "ndim", 0) == 4:
            images = list(cast("Sequence[Picture]", images))
        if not isinstance(images, list | tuple):
            return self._labels([cast("Picture", images)])[0]
        return [labels for at in range(0, len(images), BATCH) for labels in self._labels(images[at : at + BATCH])]

    def _labels(self, images: Sequence[Picture]) -> list[Labels]:
        batch = torch.stack([self.preprocess(_read(image)) for image in images])
        logits = show(self, batch.to(next(self.parameters()).device)).float().cpu()
        chances = logits.sigmoid() if self.activation == "sigmoid" else logits.softmax(1)
        names = self.classes or tuple(str(i) for i in range(logits.shape[1]))
        values, order = chances.sort(dim=1, descending=True, stable=True)
        return [
            [(names[c], p) for c, p in zip(row, ps, strict=True)]
            for row, ps in zip(order.tolist(), values.tolist(), strict=True)
        ]

    def _save_pretrained(self, save_directory: Path) -> None:
        """Called by `save_pretrained` and `push_to_hub`."""
        write_export(save_directory, self.network, self.config)
        if self.model_card is not None:
            write_whole(save_directory / "README.md", self.model_card)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> Self:
        """Called by `from_pretrained`; `options` are of the download, such as `revision` and `token`."""
        if not Path(model_id).is_dir():
            files = ["model.safetensors", "config.json", "README.md"]
            model_id = snapshot_download(model_id, allow_patterns=files, **options)
        return cls.open(model_id)

    @classmethod
    def open(cls, source: str) -> Self:
        """See `finetune_mile.load_classifier`."""
        init = parse_source(source, "load_classifier")
        opened = open_with_head(init, init.flag)
        folder = Path(init.name) if init.kind == "folder" else Path(init.name).parent
        exports = [place for place in (folder / "export", folder) if opened.own and (place / CONFIG).is_file()]
        cards = [place / "README.md" for place in exports if (place / "README.md").is_file()]
        return cls(opened, cards[0].read_text(encoding="utf-8") if cards else None)


def _read(image: Picture) -> Any:
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
    opened = open_with_head(source, "--teacher")
    network, own, known = opened.network, opened.card.preprocess, opened.classes
    size = get_head(network).out_features
    if size != len(classes):
        raise Problem(
            f"--teacher {source}: it has {size} classes, the data has {len(classes)}; give one of the same classes"
        )
    if known is not None and known != classes:
        raise Problem(f"--teacher {source}: its classes have other names or another order than in the data")
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
