"""
One file per source format: a module with `recognises` and `read`.

`SOURCES` (in `sources.py`) decides which files of a folder go to which reader.
"""
