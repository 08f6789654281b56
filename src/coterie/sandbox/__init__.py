"""Running model-written code: walls, limits, verdicts. Grading happens outside, in ``coterie.grading``."""
