"""The experiments of Arvanitidis et al. 2022, one module each, run by ``python -m pullback reproduce NAME``."""
