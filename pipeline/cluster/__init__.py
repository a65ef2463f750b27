"""Where work runs: clusters of this host or of many, their workers, and handing tasks to them.

Nothing here knows a tile or a text; what a task does is in `worker`, `product` and `text`.
"""
