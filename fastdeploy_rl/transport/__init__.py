"""How byte ranges of a publication reach another machine: one file per way."""
