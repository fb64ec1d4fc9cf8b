"""What happens to a learning rate and a gradient on the way to a step."""
