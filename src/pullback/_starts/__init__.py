"""Where a solver may start: graphs and their shortest paths."""
