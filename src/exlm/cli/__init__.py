"""The command line: the only part of exlm that prints."""
