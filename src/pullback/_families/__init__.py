"""What is known about families of distributions. Each module registers the rules of its kind."""

# These import the others.
from pullback._families import counts, directional, gaussian, positive  # noqa: F401
