"""One report section per command: its metrics, figures, tables and sentences."""
