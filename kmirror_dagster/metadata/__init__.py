"""Keeping the rest equal: topics, configurations, groups; each step plans changes, then applies them."""
