"""The paper's max retrieval: training, evaluation of every variant, tables."""
