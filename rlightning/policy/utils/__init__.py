"""Building blocks of losses and returns."""
