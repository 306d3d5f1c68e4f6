"""The events of a run or workspace, and the record that they add up to."""
