"""Networks that are in no file: random weights (`none`), timm's (`timm:NAME`), one that was given from Python."""

import copy

from torch import nn

from finetune_mile.checkpoints.cards import SCRATCH, Card
from finetune_mile.checkpoints.init import Init
from finetune_mile.checkpoints.loading import LoadReport, Opened, build_for
from finetune_mile.checkpoints.sizes import resized_as_authors
from finetune_mile.checkpoints.timm_weights import make_card
from finetune_mile.core.in_memory import get_object
from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import build
from finetune_mile.networks.vits import expand_short, is_short, split_timm


def open_without_file(init: Init, arch: str | None) -> Opened:
    """The network of `none`, `timm:NAME` or `python:NAME`, without its head; `arch` is --arch."""
    if init.kind == "python":
        return _open_given(init, arch)
    if init.kind == "timm":
        return _open_timm(init.name, arch)
    if arch is None:
        raise Problem(
            "no checkpoint and no network: say --init CHECKPOINT (`finetune-mile weights ls` lists published ones), "
            "or, to train from scratch, --init none with --arch, for example --arch resnet18"
        )
    arch = expand_short(arch) if is_short(arch) else arch
    network = build(arch)
    report = LoadReport(format="none", why="--init none", arch=arch, padding="torch", reset=tuple(network.state_dict()))
    return Opened(network=network, card=SCRATCH, report=report)


def _open_timm(name: str, arch: str | None) -> Opened:
    """A pretrained timm model without its head, and the card that timm's own notes make."""
    import timm

    from finetune_mile.networks.any_size import allow_any_size

    base = name.split(".")[0]
    if arch is not None and arch.removeprefix("timm:").split(".")[0] != base:
        raise Problem(f"--init timm:{name} is a {name}, --arch says {arch}; leave --arch out")
    build(f"timm:{base}")  # an unknown name is answered with the nearest ones
    try:
        network: nn.Module = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Problem(
            f"--init timm:{name} could not be fetched ({first}); fetch its model.safetensors elsewhere and "
            f"use --init FILE --arch timm:{base}"
        ) from error
    resized = resized_as_authors(f"timm:{name}")
    allow_any_size(network, split_timm(resized)[2].get("resize", "timm"))
    card = make_card(f"timm:{name}", base, getattr(network, "pretrained_cfg", {}))
    report = LoadReport(
        format="timm", why="--init says so", arch=resized, padding="torch", loaded=tuple(network.state_dict())
    )
    return Opened(network=network, card=card, report=report)


def _open_given(init: Init, arch: str | None) -> Opened:
    """A copy of a network that was given from Python, without its head.

    A network of `finetune_mile.load` or of timm keeps its name, so that the export of a run can be loaded without it.
    """
    own = get_object(init.text, init.flag, "")
    if not isinstance(own, nn.Module):
        raise Problem(f"{init.flag} {init}: expected a torch.nn.Module that has num_features, or text as for --init")
    if arch is not None:
        raise Problem(f"--arch {arch}: the network was given, so there is nothing to choose; leave arch out")
    network = copy.deepcopy(own)
    if hasattr(network, "reset_classifier"):
        network.reset_classifier(0)  # type: ignore[operator]
    elif isinstance(getattr(network, "fc", None), nn.Linear):
        network.fc = nn.Identity()
    known = getattr(own, "report", None)
    card = getattr(own, "card", None) if isinstance(known, LoadReport) else _timm_card(own)
    name = known.arch if isinstance(known, LoadReport) else card.arch if card else None
    if card is None or name is None or _shapes(build_for(name, card.padding, {})) != _shapes(network):
        network, name = build(init.text), init.text
        card = Card(name=name, method="python", arch=name, notes="a network that was given from Python")
    report = LoadReport(
        format="python", why="given from Python", arch=name, padding=card.padding, loaded=tuple(network.state_dict())
    )
    return Opened(network=network, card=card, report=report)


def _shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}


def _timm_card(network: nn.Module) -> Card | None:
    """The card of a network that a user made with timm; None for another network."""
    config = getattr(network, "pretrained_cfg", None)
    if not isinstance(config, dict) or not config.get("architecture"):
        return None
    base = str(config["architecture"])
    tag = f".{config['tag']}" if config.get("tag") else ""
    return make_card(f"timm:{base}{tag}", base, config)
