"""What notebook 00_start_here measures and draws beyond its cells."""

from asrkit.workbench.lessons.start_here.live import live_training_curve
from asrkit.workbench.lessons.start_here.models import BatchedTraining, demo_model, demo_test_set

__all__ = ["BatchedTraining", "demo_model", "demo_test_set", "live_training_curve"]
