"""The in-process cluster that the workflow tests share."""

from tests.pipeline.conftest import client

__all__ = ["client"]
