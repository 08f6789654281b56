"""Graders: is this program right, is this the same answer. They run in the trainer, outside the sandbox."""

from coterie.grading.programs import grade
from coterie.grading.report import Grade, Mark, Report

__all__ = ["Grade", "Mark", "Report", "grade"]
