"""Real processes that are stopped and killed at random, and a check of their history."""
