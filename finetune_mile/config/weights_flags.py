"""The command line of `weights`, a verb with verbs of its own. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune_mile.config.flags import FORMAT, Parser
from finetune_mile.core.problems import Problem

EXAMPLES = {
    "ls": "--commercial --max-mb 200", "show": "mocov2", "check": "moco.pth.tar --names",
    "convert": "runs/mine mine.safetensors",
    "add": "model.pth --name mine, then: finetune-mile run --init mine", "verify": "mocov2",
}  # fmt: skip


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


def _add_file_flags(parser: Parser) -> None:
    parser.add_argument("--arch", help="the network, where the file does not show it")
    parser.add_argument("--format", help=FORMAT)


def build_parser() -> Parser:
    parser = Parser(
        prog="finetune-mile weights",
        description="`finetune-mile weights`: what checkpoints there are, what is in a file, and other forms of it.",
        epilog="example: finetune-mile weights check FILE. finetune-mile weights VERB --help has the flags of a verb.",
    )
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="ls | show | check | convert | add | verify", parser_class=_Verb
    )
    ls = _add_verb(verbs, "ls", "list the published checkpoints that have a card")
    ls.add_argument("--licence", "--license", help="only cards with this licence, for example apache-2.0")
    ls.add_argument("--commercial", action="store_true", help="only licences that allow commercial use")
    ls.add_argument("--max-mb", type=float, help="only networks whose weights have at most so many MB")
    ls.add_argument("--json", action="store_true", help="for scripts")
    show = _add_verb(verbs, "show", "print everything that is known about one checkpoint")
    show.add_argument("name")
    check = _add_verb(verbs, "check", "what a file is, how sure, what was assumed, what is dropped, how to use it")
    check.add_argument("init", metavar="NAME_OR_FILE")
    check.add_argument(
        "--against", type=Path, metavar="FILE", help="compare features: another checkpoint, or .npz (x_N, features_N)"
    )
    check.add_argument("--image", type=Path, help="a photo: norms of its features, classes if the file has a head")
    _add_file_flags(check)
    check.add_argument("--names", action="store_true", help="list the tensors, not only their number")
    check.add_argument("--json", action="store_true", help="for scripts")
    convert = _add_verb(verbs, "convert", "write safetensors in torchvision names, and a config")
    convert.add_argument("init", metavar="FILE")
    convert.add_argument("out", type=Path)
    convert.add_argument("--to", choices=("own", "timm"), default="own")
    _add_file_flags(convert)
    head = convert.add_mutually_exclusive_group()
    head.add_argument("--drop-head", action="store_true", help="leave the trained classifier of a run out")
    head.add_argument("--keep-head", metavar="NAME", help="keep the classifier of another file, by its name there")
    add = _add_verb(verbs, "add", "a card for a file of your own: --init NAME finds it from any folder")
    add.add_argument("init", metavar="FILE", help="a file, or FILE::PREFIX")
    add.add_argument("--name", required=True, help="of the card")
    _add_file_flags(add)
    add.add_argument("--method", help="how the weights were made (default: as the file says)")
    add.add_argument("--citation", default="", help="where they are from: a paper, an address")
    add.add_argument("--overwrite", action="store_true", help="replace a card that you added before")
    verify = _add_verb(verbs, "verify", "fetch a card's file, check hash, tensors and features, and record it")
    verify.add_argument("names", nargs="*", metavar="NAME")
    verify.add_argument("--all", action="store_true", help="all cards whose files are on this machine")
    return parser
