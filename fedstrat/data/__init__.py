"""Data: sets by name, their partition over simulated clients, and the batches that a client trains on.

``partition`` is pure NumPy; ``sources`` and ``clients`` import no torch for ``digits`` and ``npz``, so a
client can say how many examples it has without it; ``loaders`` makes tensors.
"""
