"""The fences, against real resources."""
