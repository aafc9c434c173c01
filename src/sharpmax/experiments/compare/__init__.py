"""Every alternative to softmax on size generalisation: trained at small sizes by one recipe, tested at large ones."""
