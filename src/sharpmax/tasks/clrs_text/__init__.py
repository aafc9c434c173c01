"""CLRS-Text: thirty classical algorithms as questions and answers, for training at small sizes and tests at larger.

The problems come from `dm-clrs`, which is imported when the first one is drawn.

A problem belongs to training or to testing by its content, not by its seed: one in eight, by a hash of its input,
is drawn for tests alone. So no test question occurs in a training set, whatever the seeds, and the smallest sizes, of
which training may see every problem there is, have test questions too. Where a size has fewer problems than asked for,
the test questions, which are all different, are fewer.
"""

from typing import TYPE_CHECKING

from sharpmax.lazy import lazy_exports

if TYPE_CHECKING:
    from sharpmax.tasks.clrs_text.datasets import load_dataset as load_dataset
    from sharpmax.tasks.clrs_text.datasets import test_set as test_set
    from sharpmax.tasks.clrs_text.datasets import training_set as training_set
    from sharpmax.tasks.clrs_text.generation import Example as Example
    from sharpmax.tasks.clrs_text.generation import examples as examples
    from sharpmax.tasks.clrs_text.generation import final_answer as final_answer
    from sharpmax.tasks.clrs_text.sizes import ALGORITHMS as ALGORITHMS
    from sharpmax.tasks.clrs_text.sizes import test_sizes as test_sizes
    from sharpmax.tasks.clrs_text.sizes import train_sizes as train_sizes

_homes = {
    "ALGORITHMS": "sharpmax.tasks.clrs_text.sizes",
    "Example": "sharpmax.tasks.clrs_text.generation",
    "examples": "sharpmax.tasks.clrs_text.generation",
    "final_answer": "sharpmax.tasks.clrs_text.generation",
    "load_dataset": "sharpmax.tasks.clrs_text.datasets",
    "test_set": "sharpmax.tasks.clrs_text.datasets",
    "test_sizes": "sharpmax.tasks.clrs_text.sizes",
    "train_sizes": "sharpmax.tasks.clrs_text.sizes",
    "training_set": "sharpmax.tasks.clrs_text.datasets",
}

__all__ = [
    "ALGORITHMS", "Example", "examples", "final_answer", "load_dataset", "test_set", "test_sizes", "train_sizes",
    "training_set",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _homes)
