"""How large the package is: `python -m tests.size` prints files, lines and statements of each folder, and their sum."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "finetune_mile"


def sizes():
    """Folder: its files, lines and statements, those of folders inside it included."""
    totals = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
        place = path.relative_to(PACKAGE)
        folder = place.parts[0] if len(place.parts) > 1 else "(top)"
        for name in (folder, "total"):
            totals.setdefault(name, Counter()).update(files=1, lines=len(text.splitlines()), statements=statements)
    return totals


if __name__ == "__main__":
    for name, size in sorted(sizes().items(), key=lambda item: item[0] == "total"):
        print(f"{name:<12}" + "".join(f"{count:>8,} {unit}" for unit, count in size.items()))
