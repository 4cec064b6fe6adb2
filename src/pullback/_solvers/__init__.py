"""Solvers of the boundary-value problem: shortest paths between two codes."""
