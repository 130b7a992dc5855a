"""What the cells of a table would take here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from finetune_mile.core.problems import Problem
from finetune_mile.paper.tables.runs import RunKey, RunState
from finetune_mile.pricing.making import Offer, make_offer
from finetune_mile.pricing.scene import NetworkFacts, look_at_network


def price_cells(
    states: Sequence[RunState], tell: Callable[[str], None] = lambda _: None, *, others: Sequence[RunState] = ()
) -> dict[str, Offer | str]:
    """Cell in words to an offer for one run of it, or to the reason why there is none.

    Args:
        states: runs to price; one seed of a cell stands for all.
        tell: told which cell is looked at.
        others: the runs that these may need.
    """
    by_key = {s.job.key: s for s in [*others, *states]}
    offers: dict[str, Offer | str] = {}
    for state in states:
        cell = state.job.key.cell
        if cell in offers:
            continue
        tell(cell)
        if state.meaning.resolved is None:
            offers[cell] = f"no estimate for finetune-mile {state.job.verb}"
            continue
        try:
            offers[cell] = _offer(state, by_key)
        except Problem as problem:
            offers[cell] = problem.sentences[0]
    return offers


def _offer(state: RunState, by_key: Mapping[RunKey, RunState]) -> Offer:
    job, resolved = state.job, state.meaning.resolved
    assert resolved is not None
    recipe = resolved.recipe
    filled = {key: job.filled(getattr(recipe, key)) for key in ("data", "truth", "init", "teacher", "split")}
    recipe = recipe.model_copy(update={**filled, "seed": job.key.seed})
    network = _of_need(state, by_key, "init") if resolved.recipe.arch is None else None
    teacher = _of_need(state, by_key, "teacher")
    return make_offer(recipe, network=network, teacher=teacher)


def _of_need(state: RunState, by_key: Mapping[RunKey, RunState], field: str) -> NetworkFacts | None:
    """The network of another run of the table that a setting names, also before that run exists."""
    assert state.meaning.resolved is not None
    text = str(getattr(state.meaning.resolved.recipe, field))
    for name, need in state.job.needs.items():
        if f"{{{name}}}" not in text or need not in by_key:
            continue
        other = by_key[need]
        if other.meaning.resolved is None:
            arch = other.meaning.tree.get("arch")
            size = state.meaning.resolved.recipe.size
            return None if arch is None else look_at_network("none", str(arch), size)
        theirs = other.meaning.resolved.recipe
        deeper = _of_need(other, by_key, "init") if theirs.arch is None else None
        return deeper or look_at_network(theirs.init, theirs.arch, theirs.size)
    return None


def in_words(offer: Offer | str) -> str:
    """A price for a ledger: `about 3.1 h (2.8 to 3.9) a run here`."""
    if isinstance(offer, str):
        return f"no price: {offer}"
    from finetune_mile.training.display import duration

    found = offer.estimate.seconds
    return f"about {duration(found.middle)} a run"
