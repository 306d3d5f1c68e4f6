"""A verb is a module here: ``SUMMARY``, ``add_arguments(parser)`` and ``main(args, out) -> exit code``."""
