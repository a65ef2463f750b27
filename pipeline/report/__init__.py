"""What a run says of itself when it is over: when what was done (`timeline.py`), what that means (`figures.py`), and
the same as pictures and a page (`pictures.py`, `page.py`). It listens to events and reads results, and touches no
cluster, store or device."""
