"""Streams of our own providers: the shipped suite."""

from runner.testing.conformance.test_provider_streams import *
from tests.support.providers import SLOW

BY_NIGHT = SLOW
