"""Real processes, stopped and killed at random, and the checker over what they leave behind."""
