"""`python -m tests.english [FILE ...]` lists long sentences and words to avoid in docs, --help and messages.

`--lower` writes tests/english.json, the number that each file still has. It may only fall.
"""

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT = ROOT / "tests/english.json"
MOST = 25  # words in a sentence
WORDS = re.compile(
    r"\b(lies|wanted|is meant|are meant|meant (by|to|for)|goes on|go on with|hops?|play(s|ed)? (a|the)|deaf|looked at|"
    r"none that we know|what is this|where is it|a folder a class|as (it|they) (is|are)(?! \w)|whole(?! numbers?\b)|"
    r"the first of these)\b",
    re.IGNORECASE,
)
# Sentences that stay as they are, by how they begin, and why.
KEPT = {
    "set -m ended=": "a script of the shell",
    "Verdict: within noise where": "in the committed ledgers, which tests compare to the byte",
    "VALUE (try VALUE), VALUE steps are too few": "a list of causes, each with its flag",
}


def sentences(text):
    """The sentences of running text; code in backticks and a link count as their words, code as one."""
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[*_]{1,2}([^*_]+)[*_]{1,2}", r"\1", text)
    text = re.sub(r"\b(e\.g|i\.e|et al|vs|Alg|Eq)\.", r"\1", text)
    for each in re.split(r"(?<=[.!?])[)\"']?\s+(?=[A-Z\"'(`-])|\n\n+", " ".join(text.split(" "))):
        if words := re.findall(r"\S*\w\S*", each):
            yield " ".join(each.split()), len(words)


def of_page(text):
    """The pieces of a Markdown page that are read as text: paragraphs, list items, table cells, headings."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```$", "\n", text, flags=re.M | re.S)
    yield from re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) |^#+ .*$|^\|.*\|$", text, flags=re.M)
    for row in re.findall(r"^\|(.*)\|$", text, flags=re.M):
        yield from re.split(r"(?<!\\)\|", row)


def of_code(tree):
    """The strings of a module but its docstrings; what is filled in is one word."""
    skipped = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            skipped.add(body[0].value)
        if isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.split(r"\n\s*\n|\n {2,}", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(each.value if isinstance(each, ast.Constant) else "VALUE" for each in node.values)


def files():
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    yield from sorted(path for path in (ROOT / "docs").rglob("*.md") if "tables" not in path.parts)
    yield from sorted((ROOT / "finetune_mile").rglob("*.py"))


def found(path):
    """(what is wrong, the sentence) of a file, in its order."""
    text = path.read_text(encoding="utf-8")
    for part in of_page(text) if path.suffix == ".md" else of_code(ast.parse(text)):
        if len(part.split()) < 3:
            continue
        for sentence, count in sentences(part):
            if sentence.startswith(tuple(KEPT)):
                continue
            if count > MOST:
                yield f"{count} words", sentence
            if word := WORDS.search(sentence):
                yield repr(word[0]), sentence


def counts():
    """How many sentences of each file are listed; files without one are left out."""
    numbers = {path.relative_to(ROOT).as_posix(): sum(1 for _ in found(path)) for path in files()}
    return {name: number for name, number in numbers.items() if number}


if __name__ == "__main__":
    if "--lower" in sys.argv:
        before, now = json.loads(LEFT.read_text()) if LEFT.exists() else None, counts()
        lower = now if before is None else {k: min(n, before.get(k, 0)) for k, n in now.items() if before.get(k, 0)}
        LEFT.write_text(json.dumps(lower, indent=1) + "\n")
        sys.exit()
    for path in map(Path, sys.argv[1:]) if len(sys.argv) > 1 else files():
        for what, sentence in found(path.resolve()):
            print(f"{path.resolve().relative_to(ROOT)}: {what}: {sentence}")
