"""Alarms at run time when attention leaves the range it was calibrated on."""
