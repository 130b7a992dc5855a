"""Prices of cells that were not run are kept for as long as they are true."""

import json

from finetune_mile.paper.tables.writing import _prices


def test_a_price_is_forgotten_with_its_recipe(tmp_path):
    assert _prices(tmp_path, {"a": "1"}) == {}
    kept = {"cells": {"a": "about 3 h", "b": "about 4 h"}, "recipes": {"a": "1", "b": "2"}}
    (tmp_path / "prices.json").write_text(json.dumps(kept))
    assert _prices(tmp_path, {"a": "1", "b": "3"}) == {"a": "about 3 h"}
