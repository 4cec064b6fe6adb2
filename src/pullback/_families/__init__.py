"""The families of distributions: for each its Fisher information, its dual embedding and its Fisher-Rao distance, side by side.

One module per kind. Importing a module registers its rules with `pullback.fisher`, `pullback.embed` and
`pullback.rao_distance`; a family in somebody else's package registers in the same way and needs no place here.
"""
