"""What the coordinates of arrays mean beside each other: whether elements that are paired have the same ones. Where
coordinates are found, and how results carry them, is in `store/coordinates.py`."""
