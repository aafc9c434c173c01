"""Language models, loaded and scored, and the small models that experiments train."""
