"""Arrays in Zarr stores: opening them, what their metadata say, reading and writing regions, whole and concurrent.

Nothing here knows what is computed or where. How bytes move between plain files and a GPU is in `transfer`.
"""
