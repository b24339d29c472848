"""From an RLJob to the objects that make it run, one file per kind. Pure: the same job gives the same objects."""
