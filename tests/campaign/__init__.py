"""Seeded kills, damages and power cuts of the installed commands: ``make campaign``.

What is promised, and what came out, is in ``docs/reliability.md``. Every case follows from its seed; ``kills.py``,
``damages.py`` and ``power.py`` make and judge them, ``lane.py`` and ``processes.py`` start what they need,
``changes.py`` runs inside of it, and ``__main__.py`` makes the table.
"""
