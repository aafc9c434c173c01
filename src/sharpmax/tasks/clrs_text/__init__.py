"""CLRS-Text: thirty classical algorithms as questions and answers, to train on at small sizes and test at larger ones.

The problems come from `dm-clrs`, which is imported when the first one is drawn.

A hash of its input decides whether a problem is for training or, one in eight, for testing. So no test question occurs
in a training set, whatever the seeds, and the smallest sizes, which have few problems, have test questions too. Test
questions are all different, so there may be fewer of them than asked for.
"""

from sharpmax.tasks.clrs_text.datasets import load_dataset, make_dataset
from sharpmax.tasks.clrs_text.generation import Example, examples, final_answer
from sharpmax.tasks.clrs_text.sizes import ALGORITHMS, test_sizes, train_sizes

__all__ = [
    "ALGORITHMS", "Example", "examples", "final_answer", "load_dataset", "make_dataset", "test_sizes", "train_sizes",
]  # fmt: skip
