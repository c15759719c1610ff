"""Quantises models to EXL2 and GPTQ, and evaluates the result.

It takes a float model (a folder, a GGUF file) and gives a new folder with quantised weights and a report:
calibrate, measure sensitivity, allocate bits, solve layer by layer, write, report (`pipeline` reads in that
order). Its names are public as those of `exlm`; besides, only `legacy` imports it (`read_documents`).
"""

from .api import quantize_model
from .evaluate import Quality, evaluate_model, write_report
from .output import validate_exl2

__all__ = ["Quality", "evaluate_model", "quantize_model", "validate_exl2", "write_report"]
