"""Dot products of vectors in memory, on one device: `api` the public function, `device` and `host` the two ways.

Sums are made in one order whatever the launch. Stored vectors are in `tilewright.pipeline`.
"""
