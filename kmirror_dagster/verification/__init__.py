"""Comparison of both clusters, record by record."""
