"""What is known about families of distributions."""

from pullback._families import (
    categories,
    composite,
    counts,
    directional,
    gaussian,
    location_scale,
    positive,
    zero_inflated,
)

__all__ = [
    "categories",
    "composite",
    "counts",
    "directional",
    "gaussian",
    "location_scale",
    "positive",
    "zero_inflated",
]
