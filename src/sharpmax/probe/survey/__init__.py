"""What one probe of a model reads, measures and says: which heads lose focus as inputs grow."""
