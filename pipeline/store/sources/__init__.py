"""Arrays as users have them, beside Zarr's own: each is opened as an array of Zarr whose chunks lie where they are.

All that comes after `opening.py` knows one kind of input, the stored array. Nothing is stored a second time on a disk.
"""
