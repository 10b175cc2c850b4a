"""Measures this product against MirrorMaker 2, and against what the brokers can take: ``make bench``."""
