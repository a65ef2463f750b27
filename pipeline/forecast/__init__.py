"""What can be said of a run before it is made: how long it will take, by rates that earlier runs had or that were just
measured (`rates.py`, `measure.py`), and whether it fits (`forecast.py`)."""
