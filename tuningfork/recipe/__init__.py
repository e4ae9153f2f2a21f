"""Recipes: YAML and flags -> the checked settings of a run, and messages about what no setting is."""
