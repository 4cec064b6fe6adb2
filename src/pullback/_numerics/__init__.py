"""Mathematics on tensors; knows no noun of the library."""
