"""Whimbrel: serverless inference for large language models; this package is what its services share."""

__version__ = "0.1.0"
