"""Our own agents: the shipped suite."""

from runner.testing.conformance.test_agent import *
