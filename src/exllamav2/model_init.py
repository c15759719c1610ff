"""For `from exllamav2 import model_init`."""

from exlm.legacy.model_init import add_args, check_args, init, post_init_load, print_options

__all__ = ["add_args", "check_args", "init", "post_init_load", "print_options"]
