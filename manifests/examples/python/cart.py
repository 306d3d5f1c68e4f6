"""The sum of a cart, in euros."""


def total(prices: list[float]) -> float:
    return sum(round(price) for price in prices)
