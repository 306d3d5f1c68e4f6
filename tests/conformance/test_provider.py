"""Single commands, walls and limits of our own providers: the shipped suite."""

from runner.testing.conformance.test_provider import *
