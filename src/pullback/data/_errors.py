"""The one error of `pullback.data`."""


class DataError(ValueError):
    """Data that are missing, broken, cut off or not what they should be; the message names the file and the remedy."""
