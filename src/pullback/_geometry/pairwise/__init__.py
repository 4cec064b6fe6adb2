"""Distances of whole data sets.

A `Plan` cuts the pairs into blocks, a `Job` solves one block, an engine decides where blocks are solved (this process,
a pool, dask), a `DistanceStore` keeps them. A block is solved in the same way wherever that happens, so the engines
agree to the last bit.
"""
