"""Mathematics shared by strategies: pure torch, no Flower."""
