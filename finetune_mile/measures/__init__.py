"""Measures: predictions, scores and their intervals, and the warnings that follow from them."""

# The measures that a reader looks for first: key in results.json, meaning, unit.
CLOSING = (
    ("accuracy", "top-1 on the given label", "%"),
    ("probe_accuracy", "the same for the linear probe that the run started from", "%"),
    ("digit_accuracy", "top-1 among the digit classes", "%"),
    ("colour_on_digits", "mean output of the colour shown", ""),
    ("real_acc", "top-1 is in the true set", "%"),
    ("f1@0.25", "F1 at threshold 0.25", "%"),
    ("f1@0.5", "F1 at threshold 0.5", "%"),
    ("f1@best", "F1 at its own best threshold", "%"),
    ("trivial_f1", "F1 of the best constant prediction", "%"),
    ("lrap", "label ranking average precision", "%"),
    ("coverage@0.25", "labels per image at 0.25", ""),
)
