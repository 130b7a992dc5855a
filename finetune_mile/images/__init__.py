"""From --data to batches: sources, index, splits, order, pipeline, in the order in which a run uses them."""
