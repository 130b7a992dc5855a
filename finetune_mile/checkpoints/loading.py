"""From `--init` to a network: strict, and every tensor accounted for by name.

Top to bottom: what comes out; the entries (`load_public`, `load_network`, `open_trunk`); one file (`open_contents`);
tensors into a network; the classifier that a file holds.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

import numpy.typing as npt
import torch
from PIL.Image import Image
from pydantic import ValidationError
from torch import Tensor, nn

from finetune_mile.checkpoints.adapters import Adapted, adapt, few, input_of
from finetune_mile.checkpoints.adapters.adapter import tensors_of
from finetune_mile.checkpoints.adapters.behind import other_backbones
from finetune_mile.checkpoints.cards import Card
from finetune_mile.checkpoints.detect import NAMES_ONLY, assumptions, detect, is_certain, name_network
from finetune_mile.checkpoints.exporting import THRESHOLD
from finetune_mile.checkpoints.hugging_face import check_sizes, read_transformers
from finetune_mile.checkpoints.init import HEADER, Init, Located, locate, parse_init, parse_source, read_header
from finetune_mile.checkpoints.readers import Contents, read
from finetune_mile.checkpoints.readers.mapped import MappedPages
from finetune_mile.checkpoints.readers.torch_files import leaves
from finetune_mile.checkpoints.timm_weights import canonical_head, native, timm_facts
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.core.types import Activation, ExportConfig, Preprocess, first_fault
from finetune_mile.images.pipeline import centre_view, normalise, to_pixels
from finetune_mile.networks.heads import HeadBias, HeadWeight, build, get_head, new_head, set_head
from finetune_mile.networks.parts import HiddenLinear
from finetune_mile.networks.resnets import Padding, ResNet
from finetune_mile.networks.vits import build_empty, is_short

LINEAR, HIDDEN = {"fc.weight", "fc.bias"}, {"fc.hidden.weight", "fc.hidden.bias"}  # tensors of a classifier
OWN = "finetune-mile"  # the format of our exports
_MADE = "made from what was found in the file"
# What our own code, torch and timm raise on names and shapes of no network.
_NONSENSE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
COUNTER = "num_batches_tracked"  # TensorFlow and haiku have none, and nothing we compute depends on it


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of every tensor of the file and of the network."""

    format: str
    why: str
    arch: str
    padding: str
    loaded: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()  # foreign objects in the file, never called
    mapping: dict[str, str] = field(default_factory=dict)  # a recognised prefix, and what it became
    classifier: int = 0  # classes of a trained classifier in the file, used or not; 0: there is none
    certain: bool = True  # marks in the file, its config, card or a flag say what it is; False: names alone
    assumed: tuple[str, ...] = ()  # what nothing in the file shows, each with the flag to say otherwise
    others: tuple[str, ...] = ()  # other backbones of the file: what follows `::` in --init
    picked: bool = False  # the backbone was picked by its prefix

    @property
    def reason(self) -> str:
        """Why this backbone was loaded and none of the others."""
        if self.picked:
            return "the loaded one is the one that you chose"
        if self.format in NAMES_ONLY:
            return "the network itself is loaded, not a moving average of it"
        return f"the loaded one is what {self.format}'s own evaluation uses"

    def to_json(self) -> dict[str, object]:
        """Counts first, then the names: the contents of init.json."""
        counts = {part: len(getattr(self, part)) for part in ("loaded", "reset", "dropped")}
        return {"counts": counts, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A backbone with its weights; a classifier that the file holds is kept apart, unused."""

    network: nn.Module
    card: Card
    report: LoadReport
    classifier: dict[str, Tensor] = field(default_factory=dict)  # LINEAR: (C, D), (C,); perhaps HIDDEN: (H, D), (H,)
    classifier_names: dict[str, str] = field(default_factory=dict)  # what the file calls them
    config: dict[str, Any] = field(default_factory=dict)  # of the export: its header, or config.json beside the file
    transform: Callable[[Any], Tensor] | None = None  # timm's own: a PIL image to uint8 (3, size, size)

    @property
    def own(self) -> bool:
        """Is this an export of ours?"""
        return self.report.format == OWN

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

    def thresholds(self, source: object) -> Tensor:
        """The least probability of a label of each class, (C,): `thresholds` of the config, else `threshold`."""
        some, one, classes = self.config.get("thresholds"), self.config.get("threshold"), self.report.classifier
        if some is not None:
            fits = isinstance(some, list) and len(some) == classes and all(isinstance(v, float | int) for v in some)
            if not fits or not all(0 <= v <= 1 for v in some):
                raise Problem(f"{source}: `thresholds` of its config is not a list of {classes} numbers from 0 to 1")
            return torch.tensor(some, dtype=torch.float32)
        if one is not None and not (isinstance(one, float | int) and 0 <= one <= 1):
            raise Problem(f"{source}: `threshold` of its config is not a number from 0 to 1")
        return torch.full((classes,), THRESHOLD if one is None else float(one))


@dataclass(frozen=True, slots=True)
class Preprocessor:
    """One RGB image to the (3, size, size) float tensor of a checkpoint's convention."""

    convention: Preprocess

    def __call__(self, image: Image | npt.NDArray[Any] | Tensor) -> Tensor:
        """Crop the centre, resize, normalise.

        Args:
            image: a PIL image of any mode, a uint8 array (H, W, 3) or (H, W), or a uint8 tensor (3, H, W), in RGB
                order. A PIL image is turned upright and converted to RGB exactly as image files are in training.
        """
        try:
            pixels = to_pixels(image)
        except BadImage as error:
            raise Problem(f"not an image: {error}") from error
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.convention.mean, self.convention.std))
        return normalise(centre_view(pixels, self.convention), mean, std)


# ------------------------------------------------------------------------------------ the entries


def load_public(
    text: str, num_classes: int | None, arch: str | None, format: str | None = None, prefix: str | None = None
) -> nn.Module:
    """See `finetune_mile.load`."""
    init = parse_init(text, format=format, prefix=prefix)
    if num_classes is None:
        opened = open_trunk(init, arch=arch)
        network, card, report = opened.network, opened.card, opened.report
    else:
        network, card, report = load_network(init, arch=arch, num_classes=num_classes, head_bias="zero")
        if report.classifier == num_classes:
            text = f"{text.partition('::')[0]}::{init.chosen}" if init.chosen else text
            warnings.warn(
                f"load({text!r}, num_classes={num_classes}) returns a new, untrained head and ignores the trained "
                f"classifier in the file; finetune_mile.load_classifier({text!r}) returns the trained one",
                stacklevel=3,
            )
    for name, value in {"card": card, "report": report, "preprocess": Preprocessor(card.preprocess)}.items():
        setattr(network, name, value)
    return network.eval()


def load_network(
    init: str | Init,
    *,
    arch: str | None,
    num_classes: int | tuple[str, ...],
    head_bias: HeadBias,
    head_weight: HeadWeight = "normal",
    keep_head: str | None = None,
    head_from: int = 0,
) -> tuple[nn.Module, Card, LoadReport]:
    """The network that a run starts from: backbone from `init`, head new.

    Args:
        init: what `--init` takes, as text or parsed.
        arch: the network, where `init` does not say it; must agree where it does.
        num_classes: C; or the names of the classes, which must be those of a classifier that is kept.
        head_bias: how the new head's bias starts.
        head_weight: how its weights start.
        keep_head: the name that the file gives its classifier; only then it is used.
        head_from: 1 keeps SimCLR-v2's first projection layer between backbone and head.
    """
    opened = open_trunk(init, arch=arch, head_from=head_from)
    network, report = opened.network, opened.report
    count = num_classes if isinstance(num_classes, int) else len(num_classes)
    if keep_head is not None and head_from == 1 and not opened.own:
        raise Problem(
            f"--keep-head {keep_head} does not go with head_from 1: the classifier of {init} was trained on the "
            "backbone's features, not on the projection's. Use --set head_from=0, or leave --keep-head out"
        )
    if keep_head is None:
        new_head(network, count, head_bias, head_weight)
        return network, opened.card, replace(report, reset=(*report.reset, *_head_names(network)))
    check_head_name(opened, keep_head, source=str(init))
    kept = keep_own_head(opened, count, keep_head, str(init))
    if isinstance(num_classes, tuple) and opened.classes not in (None, num_classes):
        raise Problem(
            f"--keep-head {keep_head}: the classes of {init} have other names or another order than in the data; use "
            "the same class folders, or leave --keep-head out"
        )
    return network, opened.card, kept.report


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


def open_trunk(init: str | Init, *, arch: str | None = None, head_from: int = 0) -> Opened:
    """The backbone behind `init`, without a head; arguments as in `load_network`."""
    init = parse_init(init)
    if head_from not in (0, 1):
        raise Problem(f"head_from {head_from}: 0 (features) or 1 (after the first projection layer)")
    if init.kind in ("none", "python", "timm"):
        from finetune_mile.checkpoints.without_file import open_without_file

        return open_without_file(init, arch)
    located = locate(init, arch)
    return open_contents(read(located.path), located, head_from)


# --------------------------------------------------------------------------------------- one file


def open_contents(contents: Contents, located: Located, head_from: int = 0) -> Opened:
    """Open the backbone in a file that was read; `head_from` as in `load_network`.

    Names, shapes and config are a stranger's. What they make our code or torch raise is told as a fault of the file.
    """
    try:
        return _open(contents, located, head_from)
    except _NONSENSE as error:
        why = f"{type(error).__name__}: {str(error).strip()[:100]}"
        raise Problem(
            f"{located.source}: its names, shapes or config fit no network ({why}); use another copy, and report it "
            "if other tools load this file"
        ) from error


def _open(contents: Contents, located: Located, head_from: int) -> Opened:
    source, header = located.source, read_header(contents.metadata)
    config = header or located.config
    facts = _facts(config, located) if config else {}
    said = located.card or located.arch or located.format or located.prefix
    find = find_export if header and "padding" in facts and not said else find_foreign
    adapted, card, report = find(contents, located, config, facts)
    if report.arch.startswith("timm:"):
        adapted = canonical_head(adapted, report.arch)
    # head and projection layer of an export were trained together
    without = ("fc.",) if head_from == 1 or report.format == OWN else ("fc.", "proj.")
    parts = {ours: tensor for ours, tensor in adapted.tensors.items() if not ours.startswith(without)}
    heads = {ours: tensor for ours, tensor in adapted.tensors.items() if ours.startswith("fc.")}
    if head_from and "proj.0.weight" not in parts:
        raise Problem(
            f"{source} has no SimCLR-v2 projection head, so head_from 1 is not possible; say --set head_from=0"
        )
    network = build_for(report.arch, card.padding, parts)
    check_fit(network, parts, source=source)
    unused = (name for ours, name in adapted.sources.items() if ours not in parts)
    report = replace(
        report, loaded=tuple(sorted(parts)), reset=_fill(network, parts, source=source),
        dropped=(*unused, *adapted.dropped, *report.dropped),
        classifier=len(heads["fc.weight"]) if set(heads) in (LINEAR, LINEAR | HIDDEN) else 0,
    )  # fmt: skip
    return Opened(
        network=network, card=card, report=report, classifier=heads,
        classifier_names={ours: adapted.sources[ours] for ours in heads}, config=config,
    )  # fmt: skip


def find_export(
    contents: Contents, located: Located, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> tuple[Adapted, Card, LoadReport]:
    """The tensors of one of our exports, whose header says everything; `facts` are those of the header."""
    why = f"the header names a finetune_mile export of {config['arch']}"
    card = Card.model_validate({**facts, "name": located.name, "format": OWN, "notes": f"{_MADE}: {why}"})
    tensors = tensors_of(contents.tree)
    adapted = Adapted(tensors=tensors, sources={name: name for name in tensors})
    return adapted, card, LoadReport(format=OWN, why=why, arch=config["arch"], padding=card.padding)


def find_foreign(
    contents: Contents, located: Located, config: Mapping[str, Any], facts: dict[str, Any]
) -> tuple[Adapted, Card, LoadReport]:
    """The tensors of any file in our names, its card, and what its report says before the network is filled."""
    source, card, arch = located.source, located.card, located.arch
    options = facts.pop("options", {})
    named = arch or facts.get("arch") or ""
    in_timm = named.startswith("timm:") and HEADER not in contents.metadata
    match = (native(contents, named, located.prefix) if in_timm else None) or detect(contents, located)
    if card is not None and card.format not in (None, match.format):
        raise Problem(f"{source}: card {card.name} says format {card.format}, the file is {match.format} ({match.why})")
    if "model_type" in config and not facts and match.format.startswith("hf-"):
        kind = str(config["model_type"])[:40]
        raise Problem(f"config.json: model_type {kind!r} is not supported; docs/vits.md lists those that are")
    adapted = adapt(match.contents, match.adapter, source=source, place=str(located.path), prefixes=match.mapping)
    if "model_type" in config:
        check_sizes(config, {name: tuple(tensor.shape) for name, tensor in adapted.tensors.items()}, source=source)
    match, name = name_network(contents, match, adapted, located, config=facts.get("arch"), options=options)
    certain = bool(facts or card or (arch and not is_short(arch))) or is_certain(match, contents)
    assumed = () if certain else assumptions(name, arch)
    if card is None:
        card = Card.model_validate(
            {"method": match.adapter.method, "padding": match.adapter.padding,
             "preprocess": input_of(match.adapter, adapted.tensors, name), **facts, "name": located.name,
             "arch": name, "format": match.format, "notes": f"{_MADE}: {match.why}"}
        )  # fmt: skip
    report = LoadReport(
        format=match.format, why=match.why, arch=name, padding=card.padding, dropped=match.outside,
        stubs=contents.stubs, mapping=match.mapping, certain=certain,
        assumed=(*assumed, *(() if located.card else match.adapter.assumes)),
        others=other_backbones(dict(leaves(contents.tree)), adapted.used),
        picked=located.prefix is not None,
    )  # fmt: skip
    return adapted, card, report


def _facts(config: Mapping[str, Any], located: Located) -> dict[str, Any]:
    """The fields of a card that a config knows: the header of one of our exports, or `config.json` beside the file."""
    try:
        return _checked_facts(config, located)
    except ValidationError as error:
        raise Problem(f"the config of {located.path.name} is not valid: {first_fault(error)}") from error


def _checked_facts(config: Mapping[str, Any], located: Located) -> dict[str, Any]:
    if "model_type" in config and "architecture" not in config:
        return read_transformers(config, located.processor)
    if "architecture" in config:
        ExportConfig.model_validate(config)
        arch, preprocess = timm_facts(config)
        return {"arch": arch, "preprocess": preprocess}
    if not {"arch", "padding", "mean", "std"} <= config.keys():
        return {}
    ExportConfig.model_validate(config)
    facts = {
        "method": str(config.get("method", "finetune_mile")),
        "licence": str(config.get("licence", "unknown")),
        "arch": config["arch"],
        "padding": config["padding"],
        "preprocess": {key: config[key] for key in Preprocess.model_fields if key in config},
    }
    Card.model_validate({"name": located.name, **facts})
    return facts


# ---------------------------------------------------------------------------- tensors into a network


def build_for(arch: str, padding: Padding, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A backbone to be filled: it has no storage yet (meta device); some of timm's have random weights.

    Args:
        arch: the network's name.
        padding: the convention of the weights.
        tensors: of a file. Perhaps SimCLR-v2's first projection layer, which goes between backbone and head.
    """
    if arch.startswith("timm:"):
        if padding != "torch":
            raise Problem(f"--arch {arch}: these weights need {padding!r} padding, which timm does not have")
        return build_empty(arch, most=4 * sum(tensor.numel() for tensor in tensors.values()))
    with torch.device("meta"):
        network, proj = build(arch, padding=padding), tensors.get("proj.0.weight")
        if proj is not None and isinstance(network, ResNet):
            outputs, inputs = proj.shape
            network.proj = nn.Sequential(nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU())
            network.num_features = outputs
    return network


def check_fit(network: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Refuse any name or shape that differs; batch counters may be missing."""
    expected = network.state_dict()
    wrong = [
        *(f"{name} is missing" for name in expected.keys() - tensors.keys() if not name.endswith(COUNTER)),
        *(f"{name} is not in the network" for name in tensors.keys() - expected.keys()),
    ]
    for name in expected.keys() & tensors.keys():
        have, need = tuple(tensors[name].shape), tuple(expected[name].shape)
        if have != need and not (name.endswith(COUNTER) and tensors[name].numel() == 1):
            wrong.append(f"{name} is {have}, the network has {need}")
        elif not tensors[name].is_floating_point() and not name.endswith(COUNTER):
            wrong.append(f"{name} holds {tensors[name].dtype}, not floating-point numbers")
    if wrong:
        first = "; ".join(sorted(wrong)[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Problem(f"{source} does not fit the network: {first}{more}")


def _fill(network: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> tuple[str, ...]:
    """Put checked tensors into a network; returns the counters it reset.

    The network gets copies: files are mapped, tensors may be fp16, channels-last or permuted.
    """
    expected = network.state_dict()
    pages, state = MappedPages(), {}
    for name, like in expected.items():
        if name in tensors:
            state[name] = (
                tensors[name]
                .reshape(like.shape)
                .to(device="cpu", dtype=like.dtype, copy=True, memory_format=torch.contiguous_format)
            )
            pages.give_back(tensors[name])
    _check_numbers(state, source=source)
    reset = tuple(sorted(expected.keys() - state.keys()))
    state |= {name: torch.zeros_like(expected[name], device="cpu") for name in reset}
    network.load_state_dict(state, assign=True)
    return reset


def _check_numbers(tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Refuse infinite or undefined numbers, and negative variances."""
    spoilt, negative = [], []
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # One pass that NaN survives, about eight times as fast as torch.isfinite; a sum could overflow.
        least, most = (float(value) for value in tensor.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):
            spoilt.append(name)
        elif least < 0 and name.endswith("running_var"):
            negative.append(name)
    for names, fault in ((spoilt, "infinite or undefined numbers"), (negative, "negative variances")):
        if names:
            verb = "has" if len(names) == 1 else "have"
            raise Problem(f"{source}: {few(names)} {verb} {fault}; the file is damaged, use another copy or checkpoint")


# ------------------------------------------------------------------------ the classifier of a file


def check_head_name(opened: Opened, keep_head: str, *, source: str) -> None:
    """Refuse a file without a linear classifier, or one that has it under another name than `keep_head`."""
    if set(opened.classifier) != LINEAR:
        raise Problem(f"--keep-head {keep_head}: {source} has no linear classifier; leave --keep-head out")
    if keep_head not in re.split(r"[./]", opened.called):
        raise Problem(f"--keep-head {keep_head}: the classifier in {source} is called {opened.called!r}; use that name")


def keep_own_head(opened: Opened, num_classes: int = 0, keep_head: str = "fc", source: str = "") -> Opened:
    """Put the classifier of an opened file back on its backbone, in place; the caller has asked for it.

    Args:
        opened: a file with a classifier.
        num_classes: C of the task, which must be the classifier's; 0: any.
        keep_head: the name that the user gave the classifier, for messages.
        source: the file's name, for messages.
    """
    network, classifier, report = opened.network, opened.classifier, opened.report
    new_head(network, num_classes or report.classifier, "zero")
    if set(classifier) > LINEAR:
        width = len(classifier["fc.hidden.weight"])
        set_head(network, HiddenLinear(get_head(network).in_features, width, report.classifier))
    state = {name: classifier[f"fc.{name}"] for name, _ in get_head(network).named_parameters()}
    for name, parameter in get_head(network).named_parameters():
        have, need = tuple(state[name].shape), tuple(parameter.shape)
        if have != need:
            raise Problem(
                f"--keep-head {keep_head}: the classifier is {have}, this task needs {need}; leave --keep-head out"
            )
    _check_numbers(classifier, source=source or opened.card.name)
    get_head(network).load_state_dict(state)
    dropped = tuple(name for name in report.dropped if name not in opened.classifier_names.values())
    report = replace(report, loaded=(*report.loaded, *_head_names(network)), dropped=dropped)
    return replace(opened, report=report)


def _head_names(network: nn.Module) -> tuple[str, ...]:
    """The names of the head's tensors in the network's state dict."""
    own = {id(parameter) for parameter in get_head(network).parameters()}
    return tuple(name for name, parameter in network.named_parameters() if id(parameter) in own)
