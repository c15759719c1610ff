"""A float model in, a quantised one out, with a report on what was lost."""

from .api import quantize_model
from .evaluate import Quality, evaluate_model
from .report import write_report
from .validate import validate_exl2

__all__ = ["Quality", "evaluate_model", "quantize_model", "validate_exl2", "write_report"]
