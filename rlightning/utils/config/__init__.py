"""Configuration objects that policies receive."""
