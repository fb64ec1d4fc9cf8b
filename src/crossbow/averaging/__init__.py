"""Averaging: what learners exchange, and when."""
