"""Models that come with a Python package: no hub, no download at run time."""
