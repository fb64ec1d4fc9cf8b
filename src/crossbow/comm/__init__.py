"""Comm: ranks, the memory they share inside a host, and what passes between hosts."""
