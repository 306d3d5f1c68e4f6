"""``pytest --pyargs runner.testing.conformance`` needs no more than this."""

pytest_plugins = ["runner.testing.plugin"]
