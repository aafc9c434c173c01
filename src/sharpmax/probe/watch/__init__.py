"""A monitor beside a running model: what it learned, what it looks at, and when it raises an alarm."""
