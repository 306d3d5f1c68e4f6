"""Directories of our own providers: the shipped suite."""

from runner.testing.conformance.test_provider_directories import *
