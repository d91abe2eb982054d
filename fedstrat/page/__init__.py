"""``fedstrat report``: one HTML page about one run or many, which needs nothing but itself."""
