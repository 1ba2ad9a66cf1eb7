"""What all folders of tests share: waiting for a condition, and child processes."""
