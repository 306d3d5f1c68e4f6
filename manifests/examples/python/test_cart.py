import unittest

from cart import total


class CartTest(unittest.TestCase):
    def test_prices_are_rounded_after_they_are_added(self) -> None:
        assert total([1.4, 1.4]) == 2.8


if __name__ == "__main__":
    unittest.main()
