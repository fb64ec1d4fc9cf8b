"""Tune: how many learners, and how they are run, found by measuring."""
