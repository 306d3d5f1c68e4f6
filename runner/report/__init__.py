"""Reports: a finding, a plan and a run, as people and programs read them."""
