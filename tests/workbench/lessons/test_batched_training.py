"""A small model is trained on the batches of several strategies."""

from asrkit.data import Balanced, Random, at_most_seconds, plan, web_like
from asrkit.workbench.lessons.batching import BatchedTraining


def test_balanced_batches_are_found_that_make_about_as_many_steps_as_random_ones():
    lengths = web_like(400, seed=0)
    training = BatchedTraining(
        speech={}, lengths=lengths, config=None, passes=2, threads=1
    )
    random = Random(limit=at_most_seconds(120))
    steps = training.steps(random, seed=0)
    assert steps == sum(
        len(plan(random, lengths, seed=0, epoch=n).steps) for n in (0, 1)
    )
    balanced = training.balanced_with_steps(steps, 120, seed=0)
    assert abs(training.steps(balanced, seed=0) / steps - 1) < 0.15
    assert training.steps(Balanced(limit=at_most_seconds(120)), seed=0) < 0.85 * steps
