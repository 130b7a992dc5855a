"""The floor: what every other folder may use. It imports nothing else of finetune_mile."""
