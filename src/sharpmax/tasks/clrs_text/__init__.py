"""CLRS-Text: thirty classical algorithms as questions and answers, for training at small sizes and tests at larger.

The problems come from `dm-clrs`, which is imported when the first one is drawn.

A problem belongs to training or to testing by its content, not by its seed: one in eight, by a hash of its input,
is drawn for tests alone. So no test question occurs in a training set, whatever the seeds, and the smallest sizes, of
which training may see every problem there is, have test questions too. Where a size has fewer problems than asked for,
the test questions, which are all different, are fewer.
"""

from sharpmax.tasks.clrs_text.datasets import load_dataset, make_dataset
from sharpmax.tasks.clrs_text.generation import Example, examples, final_answer
from sharpmax.tasks.clrs_text.sizes import ALGORITHMS, test_sizes, train_sizes

__all__ = [
    "ALGORITHMS", "Example", "examples", "final_answer", "load_dataset", "make_dataset", "test_sizes", "train_sizes",
]  # fmt: skip
