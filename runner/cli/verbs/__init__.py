"""Verbs: each module has ``SUMMARY``, ``GROUP``, ``EXAMPLES``, ``add_arguments(parser)`` and ``main(args, out)``."""
