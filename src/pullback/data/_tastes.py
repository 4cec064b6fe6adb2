r"""Viewers with tastes, for where there are no ratings.

Movies and viewers have a place on a circle of genres, movies a popularity, viewers an appetite. A viewer has seen a
movie with probability :math:`\mathrm{sigmoid}(\text{popularity} + \text{appetite} + s \cos(\text{difference of their
angles}))`, so what there is to learn from the matrix is a circle with two further, weaker directions.
"""

from __future__ import annotations

import numpy as np

GENRES = ("adventure", "comedy", "romance", "drama", "thriller", "science fiction")
NUM_MOVIES, NUM_USERS = 90, 13_000
FOCUS = 2.0  # the strength s of tastes


def viewings(seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """Who has seen what, bool ``(users, movies)``, and titles."""
    random = np.random.default_rng(seed)
    kind = np.arange(NUM_MOVIES) % len(GENRES)
    movie_angle = 2 * np.pi * (kind + random.uniform(-0.35, 0.35, NUM_MOVIES)) / len(GENRES)
    user_angle = random.uniform(0, 2 * np.pi, NUM_USERS)
    popularity = random.normal(-1.7, 0.5, NUM_MOVIES)
    appetite = random.normal(0, 0.8, NUM_USERS)
    taste = FOCUS * np.cos(user_angle[:, None] - movie_angle)
    probability = 1 / (1 + np.exp(-(popularity + appetite[:, None] + taste)))
    titles = [f"Generated {GENRES[k]} {1 + movie // len(GENRES)}" for movie, k in enumerate(kind)]
    return random.uniform(size=probability.shape) < probability, titles
