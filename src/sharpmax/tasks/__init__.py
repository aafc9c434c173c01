"""Problems with known answers and a size that can grow: seeded, versioned, the same on every device."""
