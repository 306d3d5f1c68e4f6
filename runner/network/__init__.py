"""HTTP towards a workspace and towards the outside, shared by the model gateway and the cluster proxy."""
