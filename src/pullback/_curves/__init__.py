"""Curves in the latent space, and their measures."""
