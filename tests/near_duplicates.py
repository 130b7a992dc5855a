"""`python -m tests.near_duplicates [SHEET.png]`: how near-duplicates are found in real photos, for docs/data.md.

Prints the share of copies that are found, of 300 photos of each set, and the pairs that the sets hold themselves. The
sheet shows those pairs, the most similar first. Needs ../shared.
"""

import gzip
import io
import random
import sys
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/images")]
DATA = ROOT.parent / "shared/data"
KINDS = ("jpeg", "webp", "gif", "png", "half", "90", "180", "270", "mirror", "all")
SETS = {
    "grocery": ["grocery_store/grocery_store_short128.zip"],
    "clothing": ["clothing/clothing_small_short128.zip"],
    "cifar10": ["cifar10/cifar10_train_first1000_per_class.zip", "cifar10/cifar10_test_10k.zip"],
}


def unpacked(paths):
    for path in paths:
        with zipfile.ZipFile(DATA / path) as packed:
            for name in sorted(name for name in packed.namelist() if name.lower().endswith((".jpg", ".png"))):
                yield Image.open(io.BytesIO(packed.read(name))).convert("RGB")


def digits():
    path = next((DATA / "mnist").glob("*train-images*"))
    pixels = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=16).reshape(-1, 28, 28)
    return [Image.fromarray(digit) for digit in pixels[:4000]]


def main(sheet):
    from test_alike import COPIES

    from finetune_mile.images.alike import NEAR, compare, print_of, similarity

    shown = []
    for name, paths in {**SETS, "mnist": []}.items():
        photos = list(unpacked(paths)) or digits()
        prints = np.stack([print_of(photo) for photo in photos])
        pairs = [(alike[i], row, i) for row, alike in compare(prints) for i in np.flatnonzero(alike >= NEAR).tolist()]
        print(f"{name}: {len(photos):,} photos, {len(pairs):,} pairs")
        if paths:
            shown += [(photos[row], photos[i]) for _, row, i in sorted(pairs, reverse=True)]
            found = {}
            for kind in KINDS:
                rows = random.Random(0).sample(range(len(photos)), 300)
                copies = np.stack([print_of(COPIES[kind](photos[row])) for row in rows])
                found[kind] = float((similarity(prints[rows], copies).diagonal() >= NEAR).mean())
            print(f"  found {np.mean([*found.values()]):.1%}:", ", ".join(f"{k} {v:.1%}" for k, v in found.items()))
    if sheet:
        page = Image.new("RGB", (1680, 100 * -(-len(shown) // 8)), "white")
        for number, pair in enumerate(shown):
            for side, photo in enumerate(pair):
                photo.thumbnail((96, 96))
                page.paste(photo, (number % 8 * 210 + side * 100, number // 8 * 100))
        page.save(sheet)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
