"""Which operators a graph contains."""
