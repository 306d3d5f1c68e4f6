"""Declarative pipeline runner for AI agents: plan, policy and proof above any sandbox."""

__version__ = "0.1.0"
DISTRIBUTION = "plan-runner"  # what is installed; the command and the package are `runner`
