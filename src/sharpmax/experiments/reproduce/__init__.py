"""The paper's max retrieval: training recipes, evaluation of every arm, and the tables they end in."""
