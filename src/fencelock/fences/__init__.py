"""Fences: what lets a resource refuse the holder of an old lease. They know tokens and owners, nothing of locks."""
