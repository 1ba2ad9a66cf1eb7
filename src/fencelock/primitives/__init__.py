"""What is built on the lease."""
