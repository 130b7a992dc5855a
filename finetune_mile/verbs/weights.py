"""`finetune-mile weights`: what checkpoints there are, what is in a file, and other forms of it."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table

from finetune_mile import __version__
from finetune_mile.checkpoints.cards import (
    Card,
    fetch_card,
    find_card,
    folder_of,
    is_cached,
    list_cards,
    own_cards,
    read_card,
    shipped_file,
    spdx,
)
from finetune_mile.checkpoints.init import parse_init
from finetune_mile.config.flags import Parser, init_text
from finetune_mile.core.download import digest
from finetune_mile.core.files import whole_file, write_json
from finetune_mile.core.problems import Problem
from finetune_mile.verbs.weights_check import check_file, print_report

if TYPE_CHECKING:
    from finetune_mile.checkpoints.loading import Opened

_LINE = 150  # characters of a line of `ls` with all columns
FEATURE_TOLERANCE = 1e-3  # of the largest feature: another processor rounds otherwise

EXAMPLES = {
    "ls": "--commercial --max-mb 200", "show": "mocov2", "check": "moco.pth.tar --names",
    "convert": "runs/mine mine.safetensors",
    "add": "model.pth --name mine, then: finetune-mile run --init mine", "verify": "mocov2",
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Run one verb; 0 fine, 1 the check failed, 2 the command or its input was wrong."""
    args = _parser().parse_args(argv)
    if "format" in args:
        args.init = init_text(args.init, args.format)
    code: int = args.run(args)
    return code


class _Verb(Parser):
    """Refuses unknown flags itself, so that the nearest one is among its own."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            raise Problem(*self.strangers(rest))
        return options, rest


def _add_verb(verbs: Any, name: str, text: str) -> Parser:
    """A verb with its help and an example."""
    example = f"example: finetune-mile weights {name} {EXAMPLES[name]}"
    parser: Parser = verbs.add_parser(name, help=text, description=text, epilog=example)
    return parser


def _parser() -> Parser:
    parser = Parser(
        prog="finetune-mile weights",
        description=__doc__,
        epilog="example: finetune-mile weights check FILE. finetune-mile weights VERB --help has the flags of a verb.",
    )
    verbs = parser.add_subparsers(
        required=True, metavar="ls | show | check | convert | add | verify", parser_class=_Verb
    )
    ls = _add_verb(verbs, "ls", "list the published checkpoints that have a card")
    ls.add_argument("--licence", "--license", help="only cards with this licence, for example apache-2.0")
    ls.add_argument("--commercial", action="store_true", help="only licences that allow commercial use")
    ls.add_argument("--max-mb", type=float, help="only networks whose weights have at most so many MB")
    ls.add_argument("--json", action="store_true", help="for scripts")
    ls.set_defaults(run=_ls)
    show = _add_verb(verbs, "show", "print everything that is known about one checkpoint")
    show.add_argument("name")
    show.set_defaults(run=_show)
    check = _add_verb(verbs, "check", "what a file is, how sure, what was assumed, what is dropped, how to use it")
    check.add_argument("init", metavar="NAME_OR_FILE")
    check.add_argument(
        "--against", type=Path, metavar="FILE", help="compare features: another checkpoint, or .npz (x_N, features_N)"
    )
    check.add_argument("--image", type=Path, help="a photo: norms of its features, classes if the file has a head")
    check.add_argument("--arch", help="the network, where the file does not show it")
    check.add_argument(
        "--format", help="the code that wrote the file, where it does not show it: solo-learn, byol-convert, ..."
    )
    check.add_argument("--names", action="store_true", help="list the tensors, not only their number")
    check.add_argument("--json", action="store_true", help="for scripts")
    check.set_defaults(run=check_file)
    convert = _add_verb(verbs, "convert", "write safetensors in torchvision names, and a config")
    convert.add_argument("init", metavar="FILE")
    convert.add_argument("out", type=Path)
    convert.add_argument("--to", choices=("own", "timm"), default="own")
    convert.add_argument("--arch", help="the network, where the file does not show it")
    convert.add_argument(
        "--format", help="the code that wrote the file, where it does not show it: solo-learn, byol-convert, ..."
    )
    head = convert.add_mutually_exclusive_group()
    head.add_argument("--drop-head", action="store_true", help="leave the trained classifier of a run out")
    head.add_argument("--keep-head", metavar="NAME", help="keep the classifier of another file, by its name there")
    convert.set_defaults(run=_convert)
    add = _add_verb(verbs, "add", "a card for a file of your own: --init NAME finds it from any folder")
    add.add_argument("init", metavar="FILE", help="a file, or FILE::PREFIX")
    add.add_argument("--name", required=True, help="of the card")
    add.add_argument("--arch", help="the network, where the file does not show it")
    add.add_argument(
        "--format", help="the code that wrote the file, where it does not show it: solo-learn, byol-convert, ..."
    )
    add.add_argument("--method", help="how the weights were made (default: as the file says)")
    add.add_argument("--citation", default="", help="where they are from: a paper, an address")
    add.add_argument("--overwrite", action="store_true", help="replace a card that you added before")
    add.set_defaults(run=_add)
    verify = _add_verb(verbs, "verify", "fetch a card's file, check hash, tensors and features, and record it")
    verify.add_argument("names", nargs="*", metavar="NAME")
    verify.add_argument("--all", action="store_true", help="all cards whose files are on this machine")
    verify.set_defaults(run=_verify)
    return parser


def _say(text: str) -> None:
    Console(soft_wrap=True, highlight=False).print(text, markup=False)


# ---------------------------------------------------------------------------------- ls and show


def _ls(args: argparse.Namespace) -> int:
    """Print the cards that fit the filters, those with the best accuracy on ImageNet first."""
    cards = [read_card(path) for path in list_cards().values()]
    if args.max_mb is not None and args.max_mb <= 0:
        raise Problem(f"--max-mb {args.max_mb:g}: must be above 0")
    licences = sorted({card.licence for card in cards})
    if args.licence is not None and spdx(args.licence) not in licences:
        raise Problem(f"--licence {args.licence}: no card has it; there are {', '.join(licences)}")
    cards = [
        card
        for card in cards
        if (args.licence is None or card.licence == spdx(args.licence))
        and (args.max_mb is None or (card.size_mb is not None and card.size_mb <= args.max_mb))
        and (card.commercial or not args.commercial)
    ]
    cards.sort(key=lambda card: (not _has_file(card), card.scores_on != "ImageNet-1k", -(card.linear_top1 or 0)))
    if args.json:
        keys = {"name", "aliases", "method", "arch", "licence", "linear_top1", "knn_top1", "scores_on", "verified"}
        rows = [
            card.model_dump(mode="json", include=keys)
            | {"megabytes": card.size_mb, "size": card.preprocess.size, "cached": is_cached(card)}
            for card in cards
        ]
        _say(json.dumps(rows, indent=2))
        return 0
    if not cards:
        raise Problem("no card fits these filters; leave one of them out")
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_LINE)
    table = Table(box=None, pad_edge=False)
    for title in ("name", "method", "network", "licence", "MB", "input", "linear", "k-NN", "here", "checked"):
        if console.width >= _LINE or title not in ("method", "network", "checked"):
            right = title in ("MB", "input", "linear", "k-NN")
            table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for card in cards:
        row = {
            "name": card.name, "method": card.method,
            "network": (card.arch or "").removeprefix("timm:").partition(":")[0], "licence": card.licence,
            "MB": str(card.size_mb or ""), "input": str(card.preprocess.size),
            "linear": "" if card.linear_top1 is None else f"{card.linear_top1:.1f}",
            "k-NN": "" if card.knn_top1 is None else f"{card.knn_top1:.1f}",
            "here": "yes" if is_cached(card) else "" if _has_file(card) else "no file",
            "checked": "yes" if card.verified else "unverified",
        }  # fmt: skip
        table.add_row(*(row[str(column.header)] for column in table.columns))
    console.print(table)
    return 0


def _has_file(card: Card) -> bool:
    return bool(card.remote()) or is_cached(card)


def _show(args: argparse.Namespace) -> int:
    card = find_card(args.name)
    rows: list[tuple[str, object]] = []
    hidden = {"files", "urls", "instead"} | (set() if card.knn_top1 is not None else {"knn_k", "knn_temperature"})
    for key, value in card.model_dump(mode="json", exclude=hidden).items():
        several = value if isinstance(value, list) else [value]
        rows += [(key, each) for each in several if each not in (None, "", {})]
    for remote in (*card.remote(), *([card.instead] if card.instead else ())):
        rows += [(remote.name, url) for url in remote.urls]
        known = remote.sha256 or (f"md5 {remote.md5}..." if remote.md5 else "not published")
        rows.append(("hash", known))
    if not card.verified:
        rows.append(("unverified", "nobody here could load the published file itself"))
    place = f"in {folder_of(card)}" if card.remote() else "comes with the install"
    rows.append(("cached", f"{'yes' if is_cached(card) else 'no'}, {place}"))
    for key, value in rows:
        _say(f"{key:<16} {value}")
    return 0


# ------------------------------------------------------------------------------ check and convert


def _convert(args: argparse.Namespace) -> int:
    init = parse_init(args.init)
    from finetune_mile.checkpoints.exporting import check_free, write_export, write_timm
    from finetune_mile.checkpoints.loading import open_trunk
    from finetune_mile.pages.card import public_name

    check_free(args.out)
    opened = open_trunk(init, arch=args.arch)
    opened, head, fate = _classifier(opened, args)
    report = opened.report
    config: dict[str, Any] = opened.card.preprocess.model_dump(mode="json")
    config |= {
        "arch": report.arch, "padding": report.padding, "method": opened.card.method, "init": public_name(args.init),
        "licence": opened.card.licence, **head,
    }  # fmt: skip
    write = write_timm if args.to == "timm" else write_export
    write(args.out, opened.network, config)
    _say(f"{args.out}: {report.arch}, {len(report.loaded)} tensors, from {report.format}; {fate}")
    return 0


def _classifier(opened: Opened, args: argparse.Namespace) -> tuple[Opened, dict[str, Any], str]:
    """The network with or without the classifier of its file; the facts for its config; a few words for the user.

    The classifier of one of our runs is what the run was for, so it is kept. That of another file has seen labels
    which a later fine-tuning may not (SimCLR-v2's saw all of ImageNet's), so it is kept only if asked for by name.
    """
    from finetune_mile.checkpoints.loading import check_head_name, keep_own_head

    none: dict[str, Any] = {"num_classes": 0, "classes": []}
    if args.keep_head is not None:
        check_head_name(opened, args.keep_head, source=args.init)
    if not opened.report.classifier:
        return opened, none, "the file has no classifier"
    size = f"{opened.report.classifier} classes"
    if args.drop_head:
        return opened, none, f"classifier with {size} dropped"
    if args.keep_head is None and not opened.own:
        own = opened.called
        parts = re.split(r"[./]", own)[:-1]
        name = next((part for part in parts if part.startswith(("fc", "head", "classifier"))), parts[-1])
        fate = f"classifier {own} with {size} dropped; add --keep-head {name} to keep it"
        return opened, none, fate
    head: dict[str, Any] = {"num_classes": opened.report.classifier, "classes": list(opened.classes or ())}
    if opened.activation is not None:
        head["activation"] = opened.activation
    return keep_own_head(opened), head, f"classifier with {size} kept"


# ------------------------------------------------------------------------------ add and verify


def _add(args: argparse.Namespace) -> int:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", args.name) or args.name == "none":
        raise Problem(f"--name {args.name}: use up to 64 letters, digits, '.', '_' and '-'")
    target = own_cards() / f"{args.name}.yaml"
    known = list_cards().get(args.name)
    if known is not None and known != target:
        raise Problem(f"--name {args.name}: a card of the package has this name; choose another")
    if known is not None and not args.overwrite:
        raise Problem(f"--name {args.name}: you added a card of this name before; replace it with --overwrite")
    init = parse_init(args.init, "FILE")
    if init.kind != "file" or init.path is None:
        raise Problem(f"{args.init}: name a checkpoint file; folders and hub names need no card")
    from finetune_mile.checkpoints.loading import open_trunk

    opened = open_trunk(init, arch=args.arch)
    report, path = opened.report, init.path.resolve()
    card = opened.card.model_copy(
        update={
            "name": args.name, "aliases": (), "method": args.method or opened.card.method, "arch": report.arch,
            "padding": report.padding, "format": None, "path": str(path), "choice": init.choice, "paper": args.citation,
            "file": None, "urls": (), "files": (), "sha256": digest(path, "sha256"), "bytes": path.stat().st_size,
            "features": first_features(opened), "verified": True,
        }
    )  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as part:
        part.write_text(yaml.safe_dump(card.model_dump(mode="json", exclude_defaults=True), sort_keys=False), "utf-8")
    print_report(opened, names=False)
    _say(f"{target}\nuse it: --init {args.name}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Check cards one by one; what was seen is recorded beside the user's own cards."""
    if bool(args.names) == args.all:
        raise Problem("name the cards to verify, or --all (`finetune-mile weights ls` lists them)")
    here = [path.stem for path in list_cards().values() if is_cached(read_card(path))]
    failed = 0
    for name in here if args.all else args.names:
        card = find_card(name, "NAME")
        try:
            fine, words, seen = verify_card(card)
        except Problem as problem:
            _say(f"{name}: failed: {' '.join(problem.sentences)}")
            failed += 1
            continue
        _say(f"{name}: {words}; {record(card, seen)}")
        failed += not fine
    return 1 if failed else 0


def verify_card(card: Card) -> tuple[bool, str, dict[str, Any]]:
    """Load a card's file: whether it is as on the card, the same in words, and what to record."""
    from finetune_mile.checkpoints.loading import open_trunk

    path = fetch_card(card)  # compares the hashes that the card has
    opened = open_trunk(parse_init(card.name))
    now, known = first_features(opened), card.features
    off = max((abs(a - b) for a, b in zip(now, known, strict=False)), default=0.0)
    fine = off <= FEATURE_TOLERANCE * max(map(abs, known), default=1.0)
    files = [folder_of(card) / remote.name for remote in card.remote()] if shipped_file(card) is None else []
    files = [file for file in files if file.is_file()] or [path]  # an unpacked archive may be gone
    hashed = card.sha256 or (card.files and all(remote.sha256 for remote in card.files))
    compared = (
        ("features as on the card" if fine else f"FEATURES DIFFER by {off:.2g}") if known else "no features known"
    )
    words = (
        f"{opened.report.arch}, {len(opened.report.loaded)} tensors loaded, "
        f"{'hash as on the card' if hashed else 'the card has no hash'}, {compared}"
    )
    seen = {
        "files": {file.name: {"sha256": digest(file, "sha256"), "bytes": file.stat().st_size} for file in files},
        "features": now, "loaded": len(opened.report.loaded), "arch": opened.report.arch, "ok": fine,
        "finetune_mile": __version__,
    }  # fmt: skip
    return fine, words, seen


def record(card: Card, seen: dict[str, Any]) -> Path:
    """Write what was seen of a card's file beside the user's own cards."""
    path = own_cards() / "verified" / f"{card.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, seen)
    return path


def first_features(opened: Opened) -> tuple[float, ...]:
    """The first eight features of a fixed picture."""
    import torch

    from finetune_mile.compute.passes import show

    size = opened.card.preprocess.size
    steps = torch.linspace(-1.5, 1.5, size)
    picture = torch.stack([steps.expand(size, size), steps.unsqueeze(1).expand(size, size), torch.outer(steps, steps)])
    features = show(opened.network, picture.unsqueeze(0))[0, :8]
    return tuple(float(f"{value:.6g}") for value in features.tolist())
