"""The clusters that the workflow tests share with those of the pipeline."""

from tests.pipeline.conftest import client, processes

__all__ = ["client", "processes"]
