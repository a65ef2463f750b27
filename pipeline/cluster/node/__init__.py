"""What a profile may fix on each node that a cluster runs on: ports, and a folder. `places` has them as a profile says
them, and knows nothing of Dask; `workers` as Dask's workers take them."""
