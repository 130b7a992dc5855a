"""`finetune-mile weights`: what checkpoints there are, what is in a file, and other forms of it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys

from finetune_mile.checkpoints.cards import find_card
from finetune_mile.checkpoints.choosing import cards_table, choose_cards, facts_of, summary
from finetune_mile.checkpoints.init import parse_init
from finetune_mile.config.flags import init_text
from finetune_mile.config.weights_flags import build_parser
from finetune_mile.core.console import open_console
from finetune_mile.core.problems import Problem

_LINE = 150  # characters of a line of `ls` with all columns


def main(argv: list[str]) -> int:
    """Run one verb; 0 fine, 1 the check failed, 2 the command or its input was wrong."""
    args = build_parser().parse_args(argv)
    if "format" in args:
        args.init = init_text(args.init, args.format)
    verbs = {"ls": _ls, "show": _show, "check": _check, "convert": _convert, "add": _add, "verify": _verify}
    return verbs[args.verb](args)


def _say(*lines: str) -> int:
    console = open_console(soft_wrap=True, highlight=False)
    for line in lines:
        console.print(line, markup=False)
    return 0


def _ls(args: argparse.Namespace) -> int:
    cards = choose_cards(licence=args.licence, most_mb=args.max_mb, commercial=args.commercial)
    if args.json:
        return _say(json.dumps([summary(card) for card in cards], indent=2))
    if not cards:
        raise Problem("no card fits these filters; leave one of them out")
    terminal = open_console()
    console = terminal if terminal.is_terminal else open_console(width=_LINE)
    console.print(cards_table(cards, wide=console.width >= _LINE))
    return 0


def _show(args: argparse.Namespace) -> int:
    return _say(*(f"{key:<16} {value}" for key, value in facts_of(find_card(args.name))))


def _check(args: argparse.Namespace) -> int:
    """Check one file; 0 fine, 1 its features are others than those of --against."""
    parse_init(args.init)
    if args.image is not None and not args.image.is_file():
        raise Problem(f"--image {args.image}: there is no such file")
    from finetune_mile.checkpoints.inspecting import inspect

    found = inspect(args.init, arch=args.arch, against=args.against, photo=args.image)
    if args.json:
        sys.stdout.write(json.dumps(found.to_json(), indent=2) + "\n")
    else:
        arch = f" --arch {args.arch}" if args.arch else ""
        use = f"use it: finetune-mile run --init {shlex.quote(args.init)}{arch} --data folder:photos"
        _say(*found.say(names=args.names), use)
    return 0 if found.fine else 1


def _convert(args: argparse.Namespace) -> int:
    parse_init(args.init)
    from finetune_mile.checkpoints.converting import convert
    from finetune_mile.pages.card import public_name

    return _say(
        convert(
            args.init, args.out, called=public_name(args.init), to=args.to, arch=args.arch, keep_head=args.keep_head,
            drop_head=args.drop_head,
        )
    )  # fmt: skip


def _add(args: argparse.Namespace) -> int:
    from finetune_mile.checkpoints.converting import add_card
    from finetune_mile.checkpoints.inspecting import say_report

    opened, target = add_card(
        args.init, args.name, arch=args.arch, method=args.method, citation=args.citation, overwrite=args.overwrite
    )
    return _say(*say_report(opened, names=False), f"{target}\nuse it: --init {args.name}")


def _verify(args: argparse.Namespace) -> int:
    if bool(args.names) == args.all:
        raise Problem("name the cards to verify, or --all (`finetune-mile weights ls` lists them)")
    from finetune_mile.checkpoints.inspecting import verify_cards

    failed = 0
    for fine, line in verify_cards(args.names or None):
        failed += not fine
        _say(line)
    return 1 if failed else 0
