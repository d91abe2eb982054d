"""How fast fedstrat is, as ratios of two sides that alternate in one run."""
