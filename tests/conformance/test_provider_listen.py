"""Listening in workspaces of our own providers: the shipped suite."""

from runner.testing.conformance.test_provider_listen import *
