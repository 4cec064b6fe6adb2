"""What is known about families of distributions. Each module registers the rules of its kind."""

from pullback._families import categories as categories
from pullback._families import composite as composite
from pullback._families import counts as counts
from pullback._families import directional as directional
from pullback._families import gaussian as gaussian
from pullback._families import location_scale as location_scale
from pullback._families import positive as positive
from pullback._families import zero_inflated as zero_inflated
