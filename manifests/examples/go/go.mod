module example.org/cart

go 1.17
