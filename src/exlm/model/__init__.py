"""Putting it together: a description, files and backends become a model that answers."""

from .model import Model
from .summary import MatrixSummary, Summary

__all__ = ["MatrixSummary", "Model", "Summary"]
