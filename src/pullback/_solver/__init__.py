"""Solvers for the geodesic boundary-value problem, one file each."""
