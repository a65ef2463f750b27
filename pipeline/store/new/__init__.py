"""What a new array is stored with: its chunks, shards and codec, and its place in the groups of Zarr around it."""
