"""Work in this process, on threads of its own, where a cluster of Dask's would be one worker here and nothing more.

`opening.py` decides which of the two a run gets. What hands out work and what does it see the same in both: `client.py`
has what `pipeline/cluster/` asks of a ``distributed.Client``, `worker.py` what tasks ask of a ``distributed.Worker``.
Nothing here may import Dask's ``distributed``: its import and start take longer than a short command.
"""
