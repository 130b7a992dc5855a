"""`finetune-mile weights`: what checkpoints there are, what is in a file, and other forms of it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table

from finetune_mile import __version__
from finetune_mile.checkpoints.cards import (
    fetch_card,
    find_card,
    folder_of,
    is_cached,
    list_cards,
    own_cards,
    read_card,
)
from finetune_mile.checkpoints.init import Init, parse_init
from finetune_mile.config.flags import Parser
from finetune_mile.core.download import digest
from finetune_mile.core.files import whole_file, write_json
from finetune_mile.core.problems import Problem

if TYPE_CHECKING:
    from finetune_mile.checkpoints.loading import Opened

FEATURE_TOLERANCE = 1e-3  # of the largest feature: another processor rounds otherwise
TOLERANCE = 1e-4  # largest difference over the largest feature


def main(argv: list[str]) -> int:
    """Run one verb; 0 fine, 1 the check failed, 2 the command or its input was wrong."""
    args = _parser().parse_args(argv)
    code: int = args.run(args)
    return code


class _Verb(Parser):
    """Refuses unknown flags itself, so that the nearest one is among its own."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            raise Problem(*self.strangers(rest))
        return options, rest


def _parser() -> Parser:
    parser = Parser(
        prog="finetune-mile weights", description=__doc__, epilog="example: finetune-mile weights check FILE"
    )
    verbs = parser.add_subparsers(
        required=True, metavar="ls | show | check | convert | add | verify | docs", parser_class=_Verb
    )
    ls = verbs.add_parser("ls", help="the published checkpoints we have a card for")
    ls.add_argument("--json", action="store_true", help="for scripts")
    ls.set_defaults(run=_ls)
    show = verbs.add_parser("show", help="everything that is known of one")
    show.add_argument("name")
    show.set_defaults(run=_show)
    check = verbs.add_parser("check", help="detect, load and account for every tensor")
    check.add_argument("init", metavar="NAME_OR_FILE")
    check.add_argument("--against", type=Path, metavar="EXPECTED.npz", help="x_<size> and features_<size>")
    check.add_argument("--arch", help="the network, where the file does not show it")
    check.add_argument("--names", action="store_true", help="list the tensors, not only their number")
    check.add_argument("--json", action="store_true", help="for scripts")
    check.set_defaults(run=_check)
    convert = verbs.add_parser("convert", help="write safetensors in torchvision names, and a config")
    convert.add_argument("init", metavar="FILE")
    convert.add_argument("out", type=Path)
    convert.add_argument("--to", choices=("own", "timm"), default="own")
    convert.add_argument("--arch", help="the network, where the file does not show it")
    head = convert.add_mutually_exclusive_group()
    head.add_argument("--drop-head", action="store_true", help="leave the trained classifier of a run out")
    head.add_argument("--keep-head", metavar="NAME", help="keep the classifier of another file, by its name there")
    convert.set_defaults(run=_convert)
    add = verbs.add_parser("add", help="a card for a file of your own: --init NAME finds it from any folder")
    add.add_argument("init", metavar="FILE", help="a file, or FILE::PREFIX")
    add.add_argument("--name", required=True, help="of the card")
    add.add_argument("--arch", help="the network, where the file does not show it")
    add.add_argument("--method", help="how the weights were made (default: as the file says)")
    add.add_argument("--citation", default="", help="where they are from: a paper, an address")
    add.add_argument("--overwrite", action="store_true", help="replace a card that you added before")
    add.set_defaults(run=_add)
    verify = verbs.add_parser("verify", help="fetch a card's file, check hash, tensors and features, and record it")
    verify.add_argument("names", nargs="*", metavar="NAME")
    verify.add_argument("--all", action="store_true", help="all cards whose files are on this machine")
    verify.set_defaults(run=_verify)
    docs = verbs.add_parser("docs", help="write docs/checkpoints.md from the cards and what is measured")
    docs.add_argument("--parity", type=Path, help="folder of checkpoints that upstream code wrote")
    docs.add_argument("--rewritten", type=Path, help="the same for those that our tests wrote")
    docs.add_argument("--out", type=Path, default=Path("docs/checkpoints.md"))
    docs.set_defaults(run=_docs)
    return parser


def _say(text: str) -> None:
    Console(soft_wrap=True, highlight=False).print(text, markup=False)


# ---------------------------------------------------------------------------------- ls and show


def _ls(args: argparse.Namespace) -> int:
    cards = [read_card(path) for _, path in sorted(list_cards().items())]
    if args.json:
        keys = {"name", "aliases", "method", "arch", "linear_top1", "verified"}
        rows = [card.model_dump(mode="json", include=keys) | {"cached": is_cached(card)} for card in cards]
        _say(json.dumps(rows, indent=2))
        return 0
    table = Table("name", "method", "arch", "linear top-1", "cached", "checked by us")
    for card in cards:
        top1 = "" if card.linear_top1 is None else f"{card.linear_top1:.1f}"
        table.add_row(
            card.name, card.method, card.arch or "", top1,
            "yes" if is_cached(card) else "", "yes" if card.verified else "unverified",
        )  # fmt: skip
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=120)).print(table)
    return 0


def _show(args: argparse.Namespace) -> int:
    card = find_card(args.name)
    rows: list[tuple[str, object]] = []
    for key, value in card.model_dump(mode="json", exclude={"files", "urls"}).items():
        several = value if isinstance(value, list) else [value]
        rows += [(key, each) for each in several if each not in (None, "", {})]
    for remote in card.remote():
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


def _check(args: argparse.Namespace) -> int:
    init = parse_init(args.init)
    from finetune_mile.checkpoints.loading import open_trunk

    opened = open_trunk(init, arch=args.arch)
    against = args.against or _beside(init)
    figures = compare(opened, against) if against else {}
    fine = all(figure <= TOLERANCE for figure in figures.values())
    if args.json:
        result = {
            "init": args.init, "ok": fine, "parity": figures, "tolerance": TOLERANCE,
            "card": opened.card.model_dump(mode="json"), **opened.report.to_json(),
        }  # fmt: skip
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return 0 if fine else 1
    _print_report(opened, names=args.names)
    for size, figure in figures.items():
        verdict = "as upstream" if figure <= TOLERANCE else f"DIFFERENT (more than {TOLERANCE:g})"
        _say(f"features at {size}: {figure:.1e} of the largest, {verdict}")
    if not figures:
        _say("features: nothing to compare with (--against expected.npz)")
    return 0 if fine else 1


def _beside(init: Init) -> Path | None:
    """`expected.npz` next to the file, where there is one."""
    if init.path is None:
        return None
    beside = (init.path if init.kind == "folder" else init.path.parent) / "expected.npz"
    return beside if beside.is_file() else None


def _print_report(opened: Opened, *, names: bool) -> None:
    report, card = opened.report, opened.card
    _say(f"format: {report.format} ({report.why})")
    _say(f"network: {report.arch}, padding {report.padding}")
    seen = card.preprocess
    _say(f"input: RGB in [0, 1], mean {seen.mean}, deviation {seen.std}, {seen.size} px, {seen.interpolation}")
    for prefix, ours in report.mapping.items():
        _say(f"mapping: {prefix!r} -> {ours!r}")
    for part in ("loaded", "reset", "dropped", "stubs"):
        values = getattr(report, part)
        few = ", ".join(values if names else values[:4]) + (", ..." if len(values) > 4 and not names else "")
        _say(f"{part}: {len(values)}" + (f" ({few})" if values else ""))


def compare(opened: Opened, path: Path) -> dict[str, float]:
    """For each size in an `expected.npz`: the largest difference over the largest feature."""
    import numpy as np
    import torch

    try:
        with np.load(path, allow_pickle=False) as file:
            data = {key: file[key] for key in file.files if key.startswith(("x_", "features_"))}
    except (OSError, ValueError) as error:
        raise Problem(f"--against {path} cannot be read: {error}") from error
    sizes = [key.removeprefix("x_") for key in data if key.startswith("x_")]
    missing = [f"features_{size}" for size in sizes if f"features_{size}" not in data]
    if not sizes or missing:
        raise Problem(f"--against {path}: {', '.join(missing) or 'x_<size>'} is missing")
    network = opened.network.eval()
    figures = {}
    for size in sizes:
        with torch.inference_mode():
            features = network(torch.from_numpy(data[f"x_{size}"]).float()).numpy()
        expected = data[f"features_{size}"]
        if features.shape != expected.shape:
            figures[size] = float("inf")
            continue
        difference = float(np.abs(features - expected).max() / np.abs(expected).max())
        figures[size] = difference if np.isfinite(difference) else float("inf")
    return figures


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
    _print_report(opened, names=False)
    _say(f"{target}\nuse it: --init {args.name}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Check cards one by one; what was seen is recorded beside the user's own cards."""
    from finetune_mile.checkpoints.loading import open_trunk

    if bool(args.names) == args.all:
        raise Problem("name the cards to verify, or --all (`finetune-mile weights ls` lists them)")
    here = [path.stem for path in list_cards().values() if is_cached(read_card(path))]
    failed = 0
    for name in here if args.all else args.names:
        card = find_card(name, "NAME")
        try:
            path = fetch_card(card)
            opened = open_trunk(parse_init(card.name))
        except Problem as problem:
            _say(f"{name}: failed: {' '.join(problem.sentences)}")
            failed += 1
            continue
        now, known = first_features(opened), card.features
        off = max((abs(a - b) for a, b in zip(now, known, strict=False)), default=0.0)
        fine = off <= FEATURE_TOLERANCE * max(map(abs, known), default=1.0)
        hash_now = digest(path, "sha256") if path.is_file() else None
        seen = {"sha256": hash_now, "features": now, "loaded": len(opened.report.loaded), "arch": opened.report.arch}
        record = own_cards() / "verified" / f"{card.name}.json"
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, seen | {"ok": fine, "finetune_mile": __version__})
        hashed = "hash as on the card" if card.sha256 else "the card has no hash"
        compared = (
            ("features as on the card" if fine else f"FEATURES DIFFER by {off:.2g}") if known else "no features known"
        )
        _say(
            f"{name}: {opened.report.arch}, {len(opened.report.loaded)} tensors loaded, {hashed}, {compared}; {record}"
        )
        failed += not fine
    return 1 if failed else 0


def first_features(opened: Opened) -> tuple[float, ...]:
    """The first eight features of a fixed picture."""
    import torch

    size = opened.card.preprocess.size
    steps = torch.linspace(-1.5, 1.5, size)
    picture = torch.stack([steps.expand(size, size), steps.unsqueeze(1).expand(size, size), torch.outer(steps, steps)])
    with torch.inference_mode():
        features = opened.network.eval()(picture.unsqueeze(0))[0, :8]
    return tuple(float(f"{value:.6g}") for value in features.tolist())


def _docs(args: argparse.Namespace) -> int:
    from finetune_mile.verbs.weights_page import write_docs

    write_docs(args.out, parity=args.parity, rewritten=args.rewritten)
    _say(f"{args.out} is written")
    return 0
