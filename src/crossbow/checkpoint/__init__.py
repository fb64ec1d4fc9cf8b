"""Checkpoint: what is kept on disk: a model, or all that it takes to go on with a run."""
