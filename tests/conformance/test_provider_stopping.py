"""How commands of our own providers end: the shipped suite."""

from runner.testing.conformance.test_provider_stopping import *
from tests.support.providers import SLOW

BY_NIGHT = SLOW
