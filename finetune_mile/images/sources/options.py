"""Options behind a source's name, as in `hf:beans?label=labels&val=test`. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

from finetune_mile.core.problems import Problem, did_you_mean


def read_options(scheme: str, where: str, known: Sequence[str]) -> tuple[str, dict[str, str]]:
    """`NAME?key=value&key=value` to the name and its options; an unknown key is answered with the nearest one."""
    place, _, query = where.partition("?")
    options: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise Problem(f"--data {scheme}:{where}: write {key or 'key'}=VALUE after the question mark")
        if key not in known:
            raise Problem(f"--data {scheme}:{where}: unknown option {key}; {did_you_mean(key, known)}")
        options[key] = unquote(value)
    return place, options


def check_choices(scheme: str, where: str, options: Mapping[str, str], allowed: Mapping[str, Iterable[str]]) -> None:
    """Options that take one of a few words: any other is refused with the words."""
    for key, words in allowed.items():
        if key in options and options[key] not in words:
            raise Problem(f"--data {scheme}:{where}: {key}={options[key]} must be one of {', '.join(words)}")
