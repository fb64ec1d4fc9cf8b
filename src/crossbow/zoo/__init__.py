"""Models and tasks to start from."""
