"""Statistics on the latent manifold: means, clusters, principal directions, regression, densities."""
