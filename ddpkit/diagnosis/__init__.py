"""Which failure it is: the catalog held against a run, or against any log."""
