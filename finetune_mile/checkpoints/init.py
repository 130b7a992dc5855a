"""What `--init` names, parsed once into a value; where it is on this machine, and its config. No torch here."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from finetune_mile.checkpoints.cards import Card, Missing, fetch_card, find_card, list_cards
from finetune_mile.checkpoints.readers import Refused
from finetune_mile.checkpoints.readers.wire import message, raw, shape, table
from finetune_mile.core.files import is_finished
from finetune_mile.core.in_memory import SCHEME, get_object
from finetune_mile.core.problems import Problem

HEADER = "finetune_mile"  # the key in a safetensors file's `__metadata__` that holds an export's config as JSON
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.safetensors", "checkpoint.ckpt")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")  # of shards: transformers, accelerate
_SUFFIXES = (".pth", ".pt", ".tar", ".ckpt", ".pkl", ".safetensors", ".torch")
_FETCHED = [
    *_WEIGHTS, *_INDICES, "model-*-of-*.safetensors", "pytorch_model-*-of-*.bin", "config.json",
    "preprocessor_config.json",
]  # fmt: skip
_LARGEST_INDEX = 16 * 2**20
_STEM = b"base_model/conv2d/kernel"


Kind = Literal["none", "card", "file", "folder", "tensorflow", "timm", "hf", "python"]
_SCHEMES: dict[str, Kind] = {SCHEME: "python", "timm": "timm", "hf": "hf"}


@dataclass(frozen=True, slots=True)
class Init:
    """A checkpoint that was named and may be opened; `str` gives what the user wrote."""

    text: str
    kind: Kind
    name: str  # of the card, of timm's model, owner/name on the hub; else the path
    choice: str | None = None  # what follows `::`: a prefix, a format or a network of ours; several with `::` between
    flag: str = "--init"  # for messages
    format: str | None = None  # what --format says
    prefix: str | None = None  # of the backbone

    def __str__(self) -> str:
        return self.text

    @property
    def path(self) -> Path | None:
        """The file, the folder, or the prefix of a TensorFlow checkpoint; None for other kinds."""
        return Path(self.name) if self.kind in ("file", "folder", "tensorflow") else None

    @property
    def chosen(self) -> str | None:
        """All that was chosen, as it is written behind `::`; None: nothing was."""
        parts = (self.choice, self.prefix, f"format={self.format}" if self.format else None)
        return "::".join(filter(None, parts)) or None


def parse_init(
    text: str | Init,
    flag: str = "--init",
    *,
    format: str | None = None,
    prefix: str | None = None,
    on_disk: bool = False,
) -> Init:
    """Parse and check what `--init` takes; a value that was parsed before is returned unchanged.

    Args:
        text: a card, a file, a folder, `timm:NAME`, `hf:owner/name` or `none`, perhaps with `::` and a choice.
        flag: for messages.
        format: the name of a format, as with `::format=FORMAT`.
        prefix: of the backbone, as with `::PREFIX`.
        on_disk: it must be a file or a folder, see `parse_source`.

    Raises:
        Missing: there is no such file, folder or card.
        Problem: it cannot be right, whatever is on this machine.
    """
    if isinstance(text, Init):
        return text
    where, mark, choice = text.partition("::")
    if mark and not choice:
        raise Problem(f"{flag} {text}: nothing follows the '::'; add the prefix of the backbone, or remove the '::'")
    kind, name = (None if on_disk else _find_name(text, where, flag)) or _find_path(text, where, flag, on_disk)
    return Init(text, kind, name, choice or None, flag, format, prefix)


def parse_source(text: str | Init, flag: str) -> Init:
    """Parse what can have a trained classifier: a run folder, an export or a file, never the name of a card."""
    return parse_init(text, flag, on_disk=True)


def _find_name(text: str, where: str, flag: str) -> tuple[Kind, str] | None:
    """`none`, `timm:NAME` and the like, or a card, whose name wins over a folder that happens to be called so."""
    scheme, colon, name = where.partition(":")
    if where == "none":
        return "none", where
    if colon and scheme in _SCHEMES:
        _check_name(text, scheme, name, flag)
        return _SCHEMES[scheme], name
    return ("card", where) if "/" not in where and where in list_cards() else None


def _check_name(text: str, scheme: str, name: str, flag: str) -> None:
    """Refuse what cannot be a network of the caller's, of timm or of the hub."""
    if scheme == SCHEME:
        get_object(text, flag, "give the same network again, as in finetune_mile.train(init=..., resume=FOLDER)")
    elif scheme == "timm" and not name:
        raise Problem(f"{flag} timm: needs a model's name, as in timm:resnet50.a1_in1k")
    elif scheme == "hf" and (name.count("/") != 1 or not all(name.split("/"))):
        raise Problem(f"{flag} hf:{name}: a Hugging Face id is hf:owner/name")


def _find_path(text: str, where: str, flag: str, on_disk: bool) -> tuple[Kind, str]:
    """A file or a folder; if there is none, the prefix of a TensorFlow checkpoint or another name of a card."""
    path = Path(where).expanduser()
    if path.is_dir() and not any(path.iterdir()):
        raise Problem(f"{flag} {text}: the folder is empty")
    if path.exists():
        return "folder" if path.is_dir() else "file", str(path)
    if on_disk:
        raise Missing(f"{flag} {text}: there is no such run folder or file")
    if _index(path) is not None:
        return "tensorflow", str(path)
    if "/" in where or path.suffix in _SUFFIXES:
        raise Missing(f"{flag} {where}: there is no such file or folder")
    return "card", find_card(where, flag).name


# ------------------------------------------------------------------------------- on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A checkpoint on the disk, and what is said about it."""

    path: Path  # what the reader opens: a file, or the folder of a TensorFlow checkpoint
    name: str  # for the card of a file that has none
    card: Card | None = None
    config: dict[str, Any] = field(default_factory=dict)  # config.json beside it
    processor: dict[str, Any] = field(default_factory=dict)  # preprocessor_config.json beside it, transformers' input
    arch: str | None = None  # what the user says: the network,
    format: str | None = None  # the format,
    prefix: str | None = None  # and the backbone that is asked for

    @property
    def source(self) -> str:
        """The file's name, for messages."""
        return self.path.name


def locate(init: Init, arch: str | None = None) -> Located:
    """Find (or fetch) the files of a checkpoint; not for `none` and `timm:`, which have none. `arch` is --arch."""
    if init.kind == "card":
        card = find_card(init.name)
        located = Located(path=fetch_card(card), name=card.name, card=card)
    elif init.kind == "hf":
        located = _in_folder(_from_hub(init), init, name=f"hf:{init.name}")
    elif init.kind == "folder":
        located = _in_folder(Path(init.name), init, name=Path(init.name).resolve().name)
    else:
        located = _beside(Path(init.name), name=Path(init.name).name.split(".")[0])
    located = replace(located, arch=arch, format=init.format, prefix=init.prefix)
    choice = init.choice or (located.card.choice if located.card and not init.chosen else None)
    return located if choice is None else with_choice(located, choice)


def with_choice(located: Located, choice: str) -> Located:
    """Sort what follows `::` into network, format and prefix, beside what flags say."""
    from finetune_mile.checkpoints.adapters import ADAPTERS  # late: they need torch
    from finetune_mile.networks.resnets import parse_arch
    from finetune_mile.networks.vits import is_short

    archs, formats, prefixes = ([one] if one else [] for one in (located.arch, located.format, located.prefix))
    for part in choice.split("::"):
        named = part.removeprefix("format=")
        if named != part or part in ADAPTERS:
            formats.append(named)
        else:
            (archs if part.startswith("timm:") or parse_arch(part) or is_short(part) else prefixes).append(part)
    if len(set(archs)) > 1:
        raise Problem(f"--init {located.source}::{archs[1]} and --arch {archs[0]} name two networks; give one of them")
    for kind, word in ((set(formats), "formats"), (set(prefixes), "prefixes")):
        if len(kind) > 1:
            raise Problem(f"--init {located.source}: {' and '.join(sorted(kind))} are two {word}; give one of them")
    arch, format, prefix = (next(iter(each), None) for each in (archs, formats, prefixes))
    return replace(located, arch=arch, format=format, prefix=prefix)


def _beside(path: Path, name: str) -> Located:
    """A file of weights with the configs beside it."""
    config, beside = _read_json(path.with_name("config.json")), path.with_name("preprocessor_config.json")
    return Located(path=path, name=name, config=config, processor=_read_json(beside) if "model_type" in config else {})


def _in_folder(folder: Path, init: Init, name: str) -> Located:
    """One of our run folders, an export, a Hugging Face folder, or a TensorFlow checkpoint."""
    if (folder / "run.json").is_file() and not is_finished(folder):
        raise Problem(
            f"{init.flag} {init}: this run is not finished; continue it with --resume {shlex.quote(str(folder))}, or "
            "give the folder export inside of it, where there is one"
        )
    for path in (place / weights for place in (folder / "export", folder) for weights in (*_WEIGHTS, *_INDICES)):
        if path.is_file():
            return _beside(path, name)
    if any(folder.glob("*.distcp")) or any(folder.glob("*/*.distcp")):
        raise Problem(
            f"{init.flag} {init}: this is a distributed checkpoint (FSDP), one part for each process; merge it first: "
            "accelerate merge-weights FOLDER OUT, then give OUT"
        )
    return Located(path=folder, name=name)


def _from_hub(init: Init) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(init.name, allow_patterns=_FETCHED))
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Problem(
            f"{init.flag} hf:{init.name} could not be fetched ({first}); fetch the repository on another machine and "
            "give its folder to --init"
        ) from error


# ------------------------------------------------------------------------------------ its config


def read_config(place: Path) -> dict[str, Any]:
    """The config.json of a run folder or an export, or beside a file of weights; empty without one."""
    if not place.is_dir():
        return _read_json(place.with_name("config.json"))
    inside = place / "export/config.json"
    return _read_json(inside if inside.is_file() else place / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    if path.stat().st_size > _LARGEST_INDEX:
        raise Problem(f"{path} is larger than {_LARGEST_INDEX // 2**20} MB, too large for a config")
    return _parse_config(path.read_bytes(), str(path))


def read_header(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """The config in the header of one of our exports; None for other files."""
    if HEADER not in metadata:
        return None
    config = _parse_config(metadata[HEADER], "the header of this finetune_mile export")
    if "arch" not in config:
        raise Problem("the header of this finetune_mile export has no arch; export it again")
    return config


def _parse_config(text: str | bytes, source: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Problem(f"{source} is not valid JSON: {error}") from error
    return config if isinstance(config, dict) else {}


# ------------------------------------------------------------------------------------ its family


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How weights were made, and whether their network is more than a plain ResNet of width 1."""

    method: str
    large: bool


def family_of(init: Init) -> Family | None:
    """The family of a card, or of SimCLR's TensorFlow files; None: not known without reading everything."""
    if init.kind == "card":
        card = find_card(init.name)
        arch = card.arch or ""
        return Family(method=card.method, large=arch.endswith("-sk") or "w" in arch)
    index = _index(init.path) if init.path else None
    return None if index is None else _family_of_simclr(index)


def _index(path: Path) -> Path | None:
    """The index of a TensorFlow checkpoint that is named by its folder, its prefix or itself."""
    if path.is_dir():
        indices = sorted(path.glob("*.index"))
        return indices[0] if len(indices) == 1 else None
    named = path if path.suffix == ".index" else path.with_name(f"{path.name}.index")
    return named if named.is_file() else None


def _family_of_simclr(index: Path) -> Family | None:
    if index.stat().st_size > _LARGEST_INDEX:
        return None
    try:
        entries = table(index.read_bytes())
        if _STEM not in entries:
            return None
        stem = shape(raw(dict(message(entries[_STEM]))[2]))[-1]  # HWIO: the last side is the width
    except (Refused, OSError, KeyError, IndexError):  # loading says what is wrong with it
        return None
    convolutions = sum(k.startswith(b"base_model/conv2d") and k.endswith(b"/kernel") for k in entries)
    norms = sum(k.startswith(b"base_model/batch_norm") and k.endswith(b"/gamma") for k in entries)
    method = "simclrv2" if any(k.startswith(b"head_contrastive/") for k in entries) else "simclr"
    return Family(method=method, large=convolutions != norms or stem > 64)
