"""From `--init` to a network: strict, and every tensor accounted for by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast, get_args

from pydantic import ValidationError
from torch import Tensor, nn

from finetune_mile.checkpoints.adapters import adapt
from finetune_mile.checkpoints.architecture import name_network
from finetune_mile.checkpoints.cards import SCRATCH, Card
from finetune_mile.checkpoints.detect import Found, detect
from finetune_mile.checkpoints.fitting import build_for, check_fit, check_head_name, fill, head_names, keep_classifier
from finetune_mile.checkpoints.init import Init, Located, locate, parse_init, read_header
from finetune_mile.checkpoints.preprocessing import Preprocessor
from finetune_mile.checkpoints.readers import Contents, read
from finetune_mile.checkpoints.timm_weights import canonical_head, native, open_timm, timm_facts
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.networks.heads import HeadBias, HeadWeight, build, new_head
from finetune_mile.networks.resnets import Padding, parse_arch

Activation = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of every tensor of the file and of the network."""

    format: str
    why: str
    arch: str
    padding: str
    loaded: tuple[str, ...]
    reset: tuple[str, ...]
    dropped: tuple[str, ...]
    stubs: tuple[str, ...] = ()  # foreign objects in the file, never called
    mapping: dict[str, str] = field(default_factory=dict)  # a recognised prefix, and what it became
    classifier: int = 0  # classes of a trained classifier in the file, used or not; 0: there is none

    def to_json(self) -> dict[str, object]:
        """Counts first, then the names: the contents of init.json."""
        counts = {part: len(getattr(self, part)) for part in ("loaded", "reset", "dropped")}
        return {"counts": counts, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A trunk with its weights; a classifier that the file holds is kept apart, unused."""

    network: nn.Module
    card: Card
    report: LoadReport
    classifier: dict[str, Tensor] = field(default_factory=dict)  # fc.weight (C, D), fc.bias (C,)
    classifier_names: dict[str, str] = field(default_factory=dict)  # what the file calls them
    own: bool = False  # an export of ours
    config: dict[str, Any] = field(default_factory=dict)  # of the export: its header, or config.json beside the file

    @property
    def called(self) -> str:
        """The name under which a user asks for the classifier's weight; empty without one."""
        return "fc.weight" if self.own else self.classifier_names.get("fc.weight", "")

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classifier's classes, where the file has them."""
        names = self.config.get("classes") or self.config.get("label_names")  # timm's word for them
        return tuple(map(str, names)) if isinstance(names, list) and len(names) == self.report.classifier else None

    @property
    def activation(self) -> Activation | None:
        """How the classifier was trained, where the file says it."""
        return next((word for word in get_args(Activation) if word == self.config.get("activation")), None)


def load_public(text: str, num_classes: int | None, arch: str | None) -> nn.Module:
    """See `finetune_mile.load`."""
    if num_classes is None:
        opened = open_trunk(text, arch=arch)
        network, card, report = opened.network, opened.card, opened.report
    else:
        network, card, report = load_network(text, arch=arch, num_classes=num_classes, head_bias="zero")
        if report.classifier == num_classes:
            warnings.warn(
                f"load({text!r}, num_classes={num_classes}) returns a new, untrained head and ignores the trained "
                f"classifier in the file; finetune_mile.load_classifier({text!r}) returns the trained one",
                stacklevel=3,
            )
    return with_attributes(network, card=card, report=report, preprocess=Preprocessor(card.preprocess))


def with_attributes(network: nn.Module, **attributes: object) -> nn.Module:
    """A network in eval mode that carries what Python users ask for."""
    for name, value in attributes.items():
        setattr(network, name, cast(nn.Module, value))
    return network.eval()


def load_network(
    init: str | Init,
    *,
    arch: str | None,
    num_classes: int,
    head_bias: HeadBias,
    head_weight: HeadWeight = "normal",
    keep_head: str | None = None,
    head_from: int = 0,
) -> tuple[nn.Module, Card, LoadReport]:
    """The network that a run starts from: trunk from `init`, head new.

    Args:
        init: what `--init` takes, as text or parsed.
        arch: the network, where `init` does not say it; must agree where it does.
        num_classes: C.
        head_bias: how the new head's bias starts.
        head_weight: how its weights start.
        keep_head: the name that the file gives its classifier; only then it is used.
        head_from: 1 keeps SimCLR-v2's first projection layer between trunk and head.
    """
    opened = open_trunk(init, arch=arch, head_from=head_from)
    network, report = opened.network, opened.report
    if keep_head is not None and head_from == 1 and not opened.own:
        raise Problem(
            f"--keep-head {keep_head} does not go with head_from 1: the classifier of {init} was trained on the "
            "backbone's features, not on the projection's; say --set head_from=0, or leave --keep-head out"
        )
    new_head(network, num_classes, head_bias, head_weight)
    if keep_head is None:
        report = replace(report, reset=(*report.reset, *head_names(network)))
        return network, opened.card, report
    check_head_name(opened.classifier, opened.called, keep_head, source=str(init))
    keep_classifier(network, opened.classifier, keep_head, source=str(init))
    return network, opened.card, _with_head_loaded(report, network, opened.classifier_names)


def keep_own_head(opened: Opened) -> Opened:
    """Put the classifier of an opened file back on its trunk, in place; the caller has asked for it."""
    new_head(opened.network, opened.report.classifier, "zero")
    keep_classifier(opened.network, opened.classifier, "fc", source=opened.card.name)
    return replace(opened, report=_with_head_loaded(opened.report, opened.network, opened.classifier_names))


def _with_head_loaded(report: LoadReport, network: nn.Module, own: Mapping[str, str]) -> LoadReport:
    return replace(
        report,
        loaded=(*report.loaded, *head_names(network)),
        dropped=tuple(name for name in report.dropped if name not in own.values()),
    )


def open_trunk(init: str | Init, *, arch: str | None = None, head_from: int = 0) -> Opened:
    """The trunk behind `init`, without a head; arguments as in `load_network`."""
    init = parse_init(init)
    if head_from not in (0, 1):
        raise Problem(f"head_from {head_from}: 0 (features) or 1 (after the first projection layer)")
    if init.kind == "none":
        return _scratch(arch)
    if init.kind == "timm":
        network, card = open_timm(init.name, arch)
        report = LoadReport(
            format="timm", why="--init says so", arch=f"timm:{init.name}", padding="torch",
            loaded=tuple(network.state_dict()), reset=(), dropped=(),
        )  # fmt: skip
        return Opened(network=network, card=card, report=report)
    located = locate(init)
    return open_contents(read(located.path), located, choice=init.choice, arch=arch, head_from=head_from)


def _scratch(arch: str | None) -> Opened:
    if arch is None:
        raise Problem(
            "no checkpoint and no network: say --init CHECKPOINT (`finetune-mile weights ls` lists published ones), "
            "or, to train from scratch, --init none with --arch, for example --arch resnet18"
        )
    network = build(arch)
    report = LoadReport(
        format="none", why="--init none", arch=arch, padding="torch", loaded=(), dropped=(),
        reset=tuple(network.state_dict()),
    )  # fmt: skip
    return Opened(network=network, card=SCRATCH, report=report)


def open_contents(
    contents: Contents, located: Located, *, choice: str | None, arch: str | None, head_from: int
) -> Opened:
    """Open the backbone in a file that was read.

    Args:
        contents: the file.
        located: where it is, and what lies beside it.
        choice: what follows `::` in `--init`: a prefix, a format, or the name of one of our networks.
        arch: as in `load_network`.
        head_from: as in `load_network`.
    """
    source, card = located.path.name, located.card
    if choice is not None and parse_arch(choice) is not None:
        if arch not in (None, choice):
            raise Problem(f"--init {source}::{choice} and --arch {arch} name two networks; give one of them")
        arch, choice = choice, None
    header = read_header(contents.metadata)
    config = header or located.config
    facts = _facts(config, located)
    named = arch or facts.arch or ""
    found = native(contents, named) if named.startswith("timm:") and not header else None
    found = found or detect(contents, choice, source=source)
    if card is not None and card.format not in (None, found.format):
        raise Problem(f"{source}: card {card.name} says format {card.format}, the file is {found.format} ({found.why})")
    adapted = adapt(found.contents, found.adapter, source=source)
    on_card = card.arch if card else None
    found, name = name_network(contents, found, adapted, config=facts.arch, card=on_card, arch=arch, source=source)
    padding = card.padding if card else facts.padding or found.adapter.padding
    if name.startswith("timm:"):
        adapted = canonical_head(adapted, name)
    keep = head_from == 1 or found.adapter.own
    parts = {n: t for n, t in adapted.tensors.items() if not n.startswith(("fc.", "proj."))}
    if keep:
        parts |= {n: t for n, t in adapted.tensors.items() if n.startswith("proj.")}
    if head_from and "proj.0.weight" not in parts:
        raise Problem(
            f"{source} has no SimCLR-v2 projection head, so head_from 1 is not possible; say --set head_from=0"
        )
    network = build_for(name, padding, parts.get("proj.0.weight"))
    check_fit(network, parts, source=source)
    reset = fill(network, parts, source=source)
    unused = [own for ours, own in adapted.sources.items() if ours not in parts]
    heads = {ours: tensor for ours, tensor in adapted.tensors.items() if ours.startswith("fc.")}
    report = LoadReport(
        format=found.format, why=found.why, arch=name, padding=padding,
        loaded=tuple(sorted(parts)), reset=reset,
        dropped=(*unused, *adapted.dropped, *found.outside),
        stubs=contents.stubs, mapping=found.mapping,
        classifier=len(heads["fc.weight"]) if set(heads) == {"fc.weight", "fc.bias"} else 0,
    )  # fmt: skip
    return Opened(
        network=network,
        card=card or _card(located.name, found, facts, name, padding),
        report=report,
        classifier=heads,
        classifier_names={ours: adapted.sources[ours] for ours in heads},
        own=found.adapter.own,
        config=config,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What a config says: the header of one of our exports, or `config.json` beside the file."""

    arch: str | None = None
    padding: Padding | None = None
    preprocess: Preprocess | None = None
    method: str | None = None


def _facts(config: Mapping[str, Any], located: Located) -> _Facts:
    if "architecture" in config:
        arch, preprocess = timm_facts(config)
        return _Facts(arch=arch, preprocess=preprocess)
    if not {"arch", "padding", "mean", "std"} <= config.keys():
        return _Facts()
    known = {key: config[key] for key in Preprocess.model_fields if key in config}
    try:
        card = Card.model_validate(
            {"name": located.name, "method": str(config.get("method", "finetune_mile")),
             "arch": config["arch"], "padding": config["padding"], "preprocess": known}
        )  # fmt: skip
    except ValidationError as error:
        raise Problem(f"the config of {located.path.name} is not valid: {error}") from error
    return _Facts(arch=card.arch, padding=card.padding, preprocess=card.preprocess, method=card.method)


def _card(name: str, found: Found, facts: _Facts, arch: str, padding: Padding) -> Card:
    """A card for a file that has none: what was detected."""
    return Card(
        name=name,
        method=facts.method or found.adapter.method,
        arch=arch,
        padding=padding,
        format=found.format,
        preprocess=facts.preprocess or found.adapter.preprocess,
        notes=f"made from what was found in the file: {found.why}",
    )
