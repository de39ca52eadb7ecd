"""The engine without a model: for tests, load runs and game days. See ``engine``."""
