"""Data: sets, their order, augmentation, and batches."""
