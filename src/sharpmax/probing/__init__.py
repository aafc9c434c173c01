"""Measure a running model: capture row statistics, survey heads, forecast, horizons."""
