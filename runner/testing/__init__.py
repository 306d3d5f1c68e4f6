"""Conformance suites for plug-ins, ours and those of other distributions.

``pytest --pyargs runner.testing.conformance`` judges what other distributions have registered. Nothing of the product
imports this room: it needs the extra ``[testing]``.
"""
