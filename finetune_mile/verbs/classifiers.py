"""Any classifier by its name: a run of ours, a timm model, one on the hub, a checkpoint file with a head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.checkpoints.cards import Missing
from finetune_mile.checkpoints.init import Init, parse_source, read_config
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.images.imageset import ImageSet

if TYPE_CHECKING:  # names are checked before torch is needed
    from torch import Tensor, nn

    from finetune_mile.measures.scoring import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """A network with a head, and how it wants to see images."""

    name: str
    network: nn.Module  # in eval mode, on the CPU
    num_classes: int
    classes: tuple[str, ...] | None  # where the checkpoint names them
    how: Preprocess
    view: Callable[[Tensor], Tensor] | None = None  # uint8 (3, H, W) to its own view of it, where it has one
    activation: Activation

    def shown(self, images: ImageSet) -> ImageSet:
        """The images as this network wants them read."""
        if self.view is None:
            return images
        return dataclasses.replace(images, read=_Seen(images.read, self.view), in_memory=False)


class _Seen:
    """An image set's `read`, then a view; it travels to loader processes."""

    def __init__(self, read: Callable[[int], Tensor], view: Callable[[Tensor], Tensor]) -> None:
        self.read, self.view = read, view

    def __call__(self, index: int) -> Tensor:
        """The view of image `index`."""
        return self.view(self.read(index))


class _TimmView:
    """timm's own evaluation transform, on PIL images as timm does it, short of the normalisation."""

    def __init__(self, transform: Callable[[Any], Tensor]) -> None:
        self.transform = transform

    def __call__(self, image: Tensor) -> Tensor:
        """uint8 (3, H, W) to uint8 (3, size, size)."""
        from PIL import Image

        return self.transform(Image.fromarray(image.permute(1, 2, 0).numpy()))


def parse_model(spec: str, flag: str) -> Init:
    """Parse --model: `run:DIR`, `timm:NAME`, `hf:NAME` or `hf:DIR`, or a file; fast, before torch is imported."""
    scheme, colon, name = spec.partition(":")
    if colon and scheme == "run":
        if not Path(name).is_dir():
            raise Problem(f"{flag} {spec}: there is no directory {name!r}")
        if "arch" not in read_config(Path(name)):
            raise Problem(f"{flag} {spec}: no export in it; a finished run has export/config.json")
        return Init(spec, "folder", name, flag=flag)
    if colon and scheme in ("timm", "hf"):
        if not name:
            raise Problem(f"{flag} {spec}: the model's name is missing, as in timm:resnet50.a1_in1k")
        return Init(spec, "hf" if scheme == "hf" else "timm", name, flag=flag)
    try:
        return parse_source(spec, flag)
    except Missing as error:
        hint = "write run:DIR, timm:NAME, hf:NAME or a checkpoint file"
        raise Problem(f"{flag} {spec}: no such file; {hint}") from error


def run_folder(model: Init) -> Path | None:
    """The folder of one of our runs or exports; None for all else."""
    return model.path if model.path and model.kind == "folder" and "arch" in read_config(model.path) else None


def open_classifier(model: Init, *, weights: str | None, num_classes: int, seed: int) -> Classifier:
    """Open a model with its own head.

    Args:
        model: as `parse_model` returns it.
        weights: for timm: a file instead of the published weights, or `none` for random ones.
        num_classes: of the data; random weights get as many.
        seed: of random weights.
    """
    if model.kind in ("timm", "hf"):
        return _open_timm(model, weights, num_classes, seed)
    if weights is not None:
        raise Problem(f"--weights {weights} goes with {model.flag} timm:NAME; {model} has its own")
    return _open_own_head(model)


def _open_own_head(model: Init) -> Classifier:
    """A run, an export, or somebody's checkpoint with a classifier: evaluating it is asking for that head."""
    from finetune_mile.checkpoints.classifier import open_with_head

    opened = open_with_head(model, model.flag)
    return Classifier(
        name=model.text, network=opened.network, num_classes=opened.report.classifier, how=opened.card.preprocess,
        classes=opened.classes, activation=opened.activation or "softmax",
    )  # fmt: skip


def _open_timm(model: Init, weights: str | None, num_classes: int, seed: int) -> Classifier:
    import timm
    import torch
    from timm.data import create_transform, resolve_data_config

    name = model.name
    if model.kind == "hf":
        name = f"local-dir:{name}" if Path(name).is_dir() else f"hf-hub:{name}"
    elif not timm.is_model(name.split(".")[0]):
        near = ", ".join(timm.list_models(f"*{name.split('.')[0]}*")[:3])
        raise Problem(f"{model.flag} {model}: timm has no such model" + (f"; near: {near}" if near else ""))
    if weights == "none":
        torch.manual_seed(seed)
        network = timm.create_model(name, pretrained=False, num_classes=num_classes).eval()
    elif weights is not None:
        network = _with_file(name, Path(weights)).eval()
    else:
        try:
            network = timm.create_model(name, pretrained=True).eval()
        except Exception as error:  # hub, network, file and version troubles have no common base
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            hint = "fetch its file elsewhere and give it by --weights FILE"
            raise Problem(f"{model.flag} {model} could not be fetched ({first}); {hint}") from error
    config = resolve_data_config(network.pretrained_cfg, model=network)
    height, width = config["input_size"][1:]
    if height != width or not network.num_classes:
        what = "has no classifier" if not network.num_classes else f"wants {height} x {width} images, not squares"
        raise Problem(f"{model.flag} {model}: it {what}, so it cannot be evaluated here")
    transform = create_transform(**config, is_training=False, use_prefetcher=True)
    how = Preprocess(mean=tuple(config["mean"]), std=tuple(config["std"]), size=height, crop=1.0)
    names = network.pretrained_cfg.get("label_names")
    return Classifier(
        name=model.text, network=network, num_classes=network.num_classes, how=how, view=_TimmView(transform),
        classes=tuple(names) if names else None, activation="softmax",
    )  # fmt: skip


def _with_file(name: str, path: Path) -> Any:
    """A timm network with the weights of a file, read as every file is; its head is as wide as the file's."""
    import timm

    from finetune_mile.checkpoints.readers import read

    head = timm.get_pretrained_cfg_value(name, "classifier") or "fc"
    head = head if isinstance(head, str) else head[0]
    tree = read(path).tree
    state = tree.get("state_dict", tree)
    if f"{head}.weight" not in state:
        raise Problem(f"--weights {path}: no classifier in it ({head}.weight is missing)")
    network = timm.create_model(name, pretrained=False, num_classes=len(state[f"{head}.weight"]))
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Problem(f"--weights {path} does not fit timm:{name}: {first}") from error
    return network


def columns_for(model: Classifier, classes: Sequence[str], flag: str) -> list[int] | None:
    """Which logits answer to the data's classes, in their order; None: all as they are.

    By name where the checkpoint names its classes, by ImageNet's synset ids where the data's classes are such, and
    otherwise by position if there are as many.
    """
    names = model.classes
    if names is None and model.num_classes == 1000 and len(classes) < 1000:
        from timm.data import ImageNetInfo

        names = tuple(ImageNetInfo().label_names())
    if names is not None and set(classes) <= set(names):
        place = {name: i for i, name in enumerate(names)}
        columns = [place[name] for name in classes]
        return None if columns == list(range(model.num_classes)) else columns
    if model.classes is not None and len(names or ()) == len(classes):
        odd = sorted(set(classes) - set(model.classes))
        raise Problem(f"{flag} {model.name}: it does not know the data's class {odd[0]!r}; are these its data?")
    if model.num_classes != len(classes):
        raise Problem(
            f"{flag} {model.name}: it knows {model.num_classes} classes, the data has {len(classes)}, and their names "
            "do not say which is which"
        )
    return None
