"""What people and programs read of a finding, a plan and a run."""
