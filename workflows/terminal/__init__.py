"""What a person watches on a terminal: how far work has come (`progress.py`), as a live display (`display.py`), a
cluster's workers while somebody's job runs there (`top.py`), and what had to be compiled (`compilations.py`)."""
