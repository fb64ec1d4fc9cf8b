"""Stats: what gradients and learners say of themselves."""
