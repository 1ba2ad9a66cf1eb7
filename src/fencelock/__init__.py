"""Distributed locks that stay right when they break."""
