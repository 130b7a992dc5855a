"""Measures: predictions, scores and their intervals, and the warnings that follow from them."""

from __future__ import annotations

from collections.abc import Mapping

# The measures that a reader looks for first: key in results.json, meaning, unit.
CLOSING = (
    ("accuracy", "top-1 on the given label", "%"),
    ("balanced_accuracy", "mean of the accuracies of the classes", "%"),
    ("map", "mean over the classes of the average precision", "%"),
    ("own_size_probe_accuracy", "to beat: a linear probe at the checkpoint's own image size", "%"),
    ("probe_accuracy", "to beat: a linear probe of the checkpoint's features", "%"),
    ("knn_accuracy", "to beat: the 20 nearest labelled images by these features", "%"),
    ("own_size_probe_map", "to beat: a linear probe at the checkpoint's own image size", "%"),
    ("probe_map", "to beat: a linear probe of the checkpoint's features", "%"),
    ("knn_map", "to beat: the 20 nearest labelled images by these features", "%"),
    ("first_stage_accuracy", "before the stage with unlabelled images", "%"),
    ("first_stage_map", "before the stage with unlabelled images", "%"),
    ("over_first_stage", "difference that the unlabelled images made", "points"),
    ("over_own_size_probe", "difference to the probe at the checkpoint's own size", "points"),
    ("over_probe", "difference to the probe of the checkpoint's features", "points"),
    ("digit_accuracy", "top-1 among the digit classes", "%"),
    ("colour_on_digits", "mean output of the colour shown", ""),
    ("real_acc", "top-1 is in the true set", "%"),
    ("f1@0.25", "F1 at threshold 0.25", "%"),
    ("f1@0.5", "F1 at threshold 0.5", "%"),
    ("f1@best", "F1 at its own best threshold", "%"),
    ("f1@chosen", "F1 at the thresholds of predict, chosen on the other half of these images", "%"),
    ("trivial_f1", "F1 of the best constant prediction", "%"),
    ("lrap", "label ranking average precision", "%"),
    ("coverage@0.25", "labels per image above 0.25", ""),
)


def closing_rows(results: Mapping[str, float], method: str | None = None) -> list[tuple[str, str, str, str, str]]:
    """Key, value, unit, 95 % interval and meaning of the closing measures of a run, those of test images last.

    Labels per image are left out where each image has one and the method looks for no more.
    """
    single = method not in (None, "mile", "auto") and "accuracy" in results and "images_with_set" not in results

    def interval(key: str) -> str:
        return f"{results[f'{key}_low']:.1f} to {results[f'{key}_high']:.1f}" if f"{key}_low" in results else ""

    return [
        (f"{prefix}{key}", f"{results[prefix + key]:.2f}", unit, interval(prefix + key), meaning + where)
        for prefix, where in (("", ""), ("test_", ", on the test images"))
        for key, meaning, unit in CLOSING
        if prefix + key in results and not (single and key == "coverage@0.25")
    ]


def say_images(results: Mapping[str, float], *, trial: bool, share: float, step: int) -> list[str]:
    """Which images and weights the numbers of a run are of, and what the run knew of these images.

    Args:
        results: of results.json.
        trial: did a trial decide on the share?
        share: how far the weights went from the first ones (0) to those of `step` (1).
        step: that training ended with, or that `patience` chose.
    """
    sentences = [f"Scores are of {int(results['images']):,} validation images, which were evaluated during the run."]
    if "test_images" in results:
        sentences.append(
            f"Scores that begin with test_ are of {int(results['test_images']):,} test images, which were scored once, "
            "with the final weights; nothing was chosen on them."
        )
    if "chosen_step" in results:
        sentences.append(
            f"--patience: training ended after {int(results['last_step']):,} steps, and the weights of step "
            f"{int(results['chosen_step']):,} were chosen by these validation images. So their scores are a little too "
            "good."
        )
    if share < 1:
        between = f"halfway between the first ones (before fine-tuning) and those of step {step:,}"
        sentences.append(
            f"The scored weights are {between if share else 'the first ones (before fine-tuning)'}. metrics.jsonl has "
            f"the scores of step {step:,} itself."
        )
    if trial:
        sentences.append(
            "Held-out labels of the trial chose how far the weights went (trial/decision.json). Their losses are too "
            "good to be a test."
        )
    return sentences
