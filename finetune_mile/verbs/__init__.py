"""The verbs of `finetune-mile`, one module each."""
