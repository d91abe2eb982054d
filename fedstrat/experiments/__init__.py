"""Experiments of many runs: recipes, the cell that validation chooses, and the table over seeds."""
