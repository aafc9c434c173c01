"""Row statistics of attention logits: one value type, one function, several implementations."""
