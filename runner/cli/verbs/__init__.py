"""A verb is a module here: ``SUMMARY``, ``GROUP``, ``EXAMPLES``, ``add_arguments(parser)`` and
``main(args, out) -> exit code``."""
