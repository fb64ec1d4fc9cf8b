"""Engines: how the learners of one rank are executed."""
