"""From codes to distributions, and where the data end."""
